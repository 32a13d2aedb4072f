"""The report and the comparison: what they say, that they load nothing, and that a browser shows them."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import pytest

from depthbench.profiling.analysis import summarize
from depthbench.profiling.compare import compare
from depthbench.profiling.compare_page import comparison_page, write_comparison
from depthbench.profiling.events import Recording
from depthbench.profiling.report import report, write_report
from tests.profiling.browser import needs_chromium, open_page, run_in
from tests.profiling.recordings import Pipeline, by_hand

FOLDER = Path("recorded")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
COMMITTED = ("with_cache.html", "without_cache.html", "compare.html")
EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>&"\''
VOID = {"meta", "input", "br", "img"}


def made(recording: Recording) -> str:
    return report(recording, summarize(recording))


def every_page() -> dict[str, str]:
    whole = Pipeline().recording(FOLDER)
    damaged = Pipeline(replicas=2).recording(FOLDER, missing=(1, 4))
    return {
        "whole": made(whole),
        "no plan": made(Pipeline().recording(FOLDER, planned=False)),
        "by hand": made(by_hand(FOLDER)),
        "damaged": made(damaged),
        "compared": comparison_page(compare(whole, damaged)),
        **{name: (EXAMPLES / name).read_text(encoding="utf-8") for name in COMMITTED},
    }


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", every_page())
def test_a_page_is_whole_and_refers_to_nothing_outside(name: str) -> None:
    page = every_page()[name]
    reader = Reader(page)
    assert not re.search(r"https?:|//[a-z]|@import|src=|href=", page.replace("http-equiv", ""))
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#idle", "#unknown"}
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(reader.tags)
    assert reader.tags.count("script") == 1
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'") in reader.attributes


def test_the_numbers_are_there() -> None:
    recording = Pipeline().recording(FOLDER)
    summary, text = summarize(recording), " ".join(Reader(made(recording)).text)
    assert f"{100 * summary.bubble:.1f} %" in text and "planned 20.0 %" in text
    assert "synthetic · block_attnres" in text and "4 ranks, 4 stages, 3 steps" in text
    assert f"{summary.tokens_per_second:,.0f}" in text
    assert "all 14 edges" in text and "Missing" not in text
    assert "microbatch 3, chunk 2" in text  # a tooltip


def test_each_box_of_the_step_is_drawn_once() -> None:
    page = made(Pipeline(steps=1).recording(FOLDER))
    assert len(re.findall(r'<rect class="forward v[01]"', page)) == 8 * 8
    assert len(re.findall(r'<rect class="backward v[01]"', page)) == 8 * 8
    assert len(re.findall(r'<line class="message"', page)) == 8 * 7 * 2


def test_missing_ranks_are_said_first() -> None:
    text = " ".join(Reader(made(Pipeline().recording(FOLDER, missing=(1, 3)))).text)
    assert 0 < text.index("Missing: ranks 1, 3") < text.index("tokens a second")
    assert text.count("no recording of this rank") == 2 * 3  # two rows in each of three steps


def test_other_bytes_than_planned_stand_out() -> None:
    recording = Pipeline().recording(FOLDER)
    assert recording.plan is not None
    recording.plan["edges"][0]["bytes"] *= 2
    page = made(recording)
    assert "13 of 14 edges" in page and 'class="n bad"' in page
    assert 'class="n bad"' not in made(Pipeline().recording(FOLDER))


def evil() -> Recording:
    recording = Pipeline().recording(Path("runs") / EVIL.replace("/", "|"))
    records = [replace(record, host=EVIL, device=EVIL) for record in recording.ranks]
    plan = {**(recording.plan or {}), "architecture": EVIL, "run": {"name": EVIL, EVIL: EVIL, "parallel": {EVIL: EVIL}}}
    return replace(recording, ranks=records, plan=plan)


@pytest.mark.parametrize("page", [made(evil()), comparison_page(compare(evil(), evil()))])
def test_what_comes_from_files_is_escaped(page: str) -> None:
    reader = Reader(page)
    assert "img" not in reader.tags and reader.tags.count("script") == 1
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert any(EVIL.split("/")[0] in text for text in reader.text)


@needs_chromium
@pytest.mark.parametrize("name", every_page())
def test_a_browser_shows_it(name: str, tmp_path: Path) -> None:
    """Without a word on the console, and not an empty page."""
    page = tmp_path / "report.html"
    page.write_text(every_page()[name], encoding="utf-8")
    shot = tmp_path / "shot.png"
    _, said = open_page(page, tmp_path / "profile", f"--screenshot={shot}")
    assert said == []
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2400, 1280)
    colors = {tuple(color) for color in (pixels[::4, ::4].reshape(-1, 3) * 255).round().astype(int).tolist()}
    assert {(0x2A, 0x9D, 0x8F), (0xFF, 0xFF, 0xFF)} <= colors, "no backward box, no card"
    assert len(colors) > 50


@needs_chromium
def test_the_browser_would_have_told(tmp_path: Path) -> None:
    """Of an error in a script, and of anything that the page tried to load."""
    page = tmp_path / "report.html"
    sound = every_page()["by hand"]
    for fault in ("<script>throw new Error('broken')</script>", '<img src="http://example.invalid/x.png">'):
        page.write_text(sound.replace("</main>", f"{fault}</main>"), encoding="utf-8")
        assert open_page(page, tmp_path / f"profile{len(fault)}", "--dump-dom")[1]


@needs_chromium
def test_step_zoom_and_microbatch_can_be_chosen(tmp_path: Path) -> None:
    page, recording = tmp_path / "report.html", Pipeline().recording(FOLDER)
    summary = summarize(recording)
    write_report(recording, summary, page)
    script = """
        const shown = () => [...document.querySelectorAll(".view")].filter((v) => !v.hidden).map((v) => v.dataset.step);
        const change = (id, value, kind) => {
          const control = document.getElementById(id);
          control.value = value;
          control.dispatchEvent(new Event(kind));
        };
        const before = shown();
        change("step", "2", "change");
        const drawing = document.querySelector(".view:not([hidden]) svg");
        const width = drawing.getBoundingClientRect().width;
        const small = drawing.querySelectorAll(".small").length;
        change("zoom", "2", "input");
        const wider = drawing.getBoundingClientRect().width / width;
        drawing.querySelector("rect[data-m='5']").dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
        const lit = new Set([...drawing.querySelectorAll(".lit")].map((shape) => shape.dataset.m));
        const line = getComputedStyle(drawing.querySelector("line.lit")).display;
        const fewer = drawing.querySelectorAll(".small").length <= small;
        return {before, after: shown(), wider, fewer, lit: [...lit], line};
    """
    answer = json.loads(run_in(page, script, tmp_path / "profile"))
    assert answer["before"] == [str(summary.typical_step)] and answer["after"] == ["2"]
    assert answer["wider"] == pytest.approx(4, rel=0.01) and answer["fewer"]
    assert (answer["lit"], answer["line"]) == (["5"], "inline")


def test_compared() -> None:
    first = Pipeline().recording(Path("one"))
    second = Pipeline(virtual=1, forward=1800, backward=3800).recording(Path("two"))
    comparison = compare(first, second)
    plain = comparison.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["first"]["name"], plain["second"]["name"]) == ("one", "two")
    step = plain["figures"]["step, median"]
    assert step["ratio"] == step["second"] / step["first"] > 1
    page = comparison_page(comparison)
    assert f"{step['ratio']:.2f} x" in page


def test_compared_timelines_share_their_axis(tmp_path: Path) -> None:
    """A rank's optimizer, the last of its step, ends at the right edge of the longer one alone."""
    first, second = Pipeline().recording(Path("one")), Pipeline(virtual=1, wire=9000).recording(Path("two"))
    comparison = compare(first, second)
    write_comparison(comparison, tmp_path / "new" / "compare.html")
    page = (tmp_path / "new" / "compare.html").read_text()
    ends = []
    for drawing in page.split('<svg class="timeline"')[1:]:
        boxes = re.findall(r'<rect class="optimizer" x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawing)
        ends.append(max(float(x) + float(width) for x, width in boxes))
    steps = [
        next(step.length for step in side.summary.steps if step.step == side.summary.typical_step)
        for side in (comparison.first, comparison.second)
    ]
    assert ends == [pytest.approx(100 * steps[0] / steps[1], abs=0.01), pytest.approx(100, abs=0.01)]
