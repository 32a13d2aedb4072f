"""`depthbench generate`: the same text from every layout, seeded draws, stops, text as it comes, and bad input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from depthbench import cli
from depthbench.data.tokenizers import Tokenizer, load_tokenizer
from depthbench.inference.prompt import TextStream
from depthbench.inference.sampling import Sampler
from depthbench.model.stage import DecoderStage
from tests.corpora import Corpus

from .commands import LAYOUTS, checkpoint, command, processes_of

IDS = "7 300 42 5 5 111 260 3 90"
TEXT = "Größe: naïve 🙂"
INTERLEAVED = LAYOUTS["pp2_vp2"]


@pytest.fixture(scope="module")
def folder(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(corpus, tmp_path_factory.mktemp("generate") / "run", sublayers_per_block=3)


def written(folder: Path, *options: str, layout: str = "single", prompt: str = IDS) -> dict[str, Any]:
    words = LAYOUTS[layout]
    said = command(
        "generate", str(folder), *words, "--json", "--max-tokens", "8", "--ids", prompt, *options,
        processes=processes_of(layout),
    )  # fmt: skip
    assert said.code == 0, said.everyone
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_every_layout_writes_the_same(folder: Path) -> None:
    """Greedy and drawn; in one go, or each token from the whole text before it."""
    greedy, drawn = ("--chunk", "4"), ("--chunk", "4", "--temperature", "0.9", "--top-p", "0.8", "--seed", "2")
    expected = [written(folder, *options)["tokens"] for options in (greedy, drawn)]
    assert len(expected[0]) == len(expected[1]) == 8 and expected[0] != expected[1]
    for layout in LAYOUTS:
        assert [written(folder, *options, layout=layout)["tokens"] for options in (greedy, drawn)] == expected
    for count in (1, 5):
        before = " ".join([IDS, *map(str, expected[0][:count])])
        assert written(folder, prompt=before)["tokens"][: 8 - count] == expected[0][count:]


def test_stops(folder: Path) -> None:
    tokens = written(folder)["tokens"]
    assert len(set(tokens)) > 2
    stop = tokens[3]
    stopped = written(folder, "--stop", str(stop), "--stop", "514")
    assert stopped["tokens"] == tokens[: tokens.index(stop)] and stopped["stopped_by"] == stop


def test_the_end_of_a_document_stops(folder: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tokenizer's; where ids alone are known no token ends anything."""
    eod = load_tokenizer(corpus.tokenizer).eod
    script = [5, 7, eod, 9, 11, 13, 15, 17]
    drawn: list[int] = []

    def draw(sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
        drawn.append(script[len(drawn)])
        return torch.tensor(drawn[-1:])

    monkeypatch.setattr(Sampler, "__call__", draw)
    stopped = written(folder, "--tokenizer", str(corpus.tokenizer))
    assert stopped["tokens"] == [5, 7] and stopped["stopped_by"] == eod
    assert stopped["text"] == load_tokenizer(corpus.tokenizer).decode([5, 7])
    going_on = written(folder)
    assert going_on["tokens"] == script and going_on["stopped_by"] is None


def test_text_as_it_comes(folder: Path, corpus: Corpus) -> None:
    said = command("generate", str(folder), "--prompt", TEXT, "--max-tokens", "6")
    as_json = command("generate", str(folder), "--prompt", TEXT, "--max-tokens", "6", "--json")
    assert said.code == as_json.code == 0
    assert said.out == json.loads(as_json.out)["text"] + "\n"
    tokenizer = load_tokenizer(corpus.tokenizer)
    ids = tokenizer.encode_batch(["A " + TEXT])[0]
    pieces: list[str] = []
    stream = TextStream(tokenizer, ids[:2], pieces.append)
    for token in ids[2:]:
        stream.add(token)
    stream.finish()
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)[len(tokenizer.decode(ids[:2])) :]
    assert len([piece for piece in pieces if piece]) > 5 and not any("\ufffd" in piece for piece in pieces)


def test_ids_that_only_the_model_has_are_not_written(
    folder: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the likeliest is one of the three by which the model's vocabulary is larger than the tokenizer's."""
    project = DecoderStage.project

    def padded_first(stage: DecoderStage, hidden: torch.Tensor) -> torch.Tensor:
        logits = project(stage, hidden)
        logits[..., 513] = logits.max() + 1
        return logits

    plain = written(folder, "--tokenizer", corpus.tokenizer)
    monkeypatch.setattr(DecoderStage, "project", padded_first)
    assert written(folder)["tokens"] == [513] * 8
    found = written(folder, "--tokenizer", corpus.tokenizer)
    assert len(plain["tokens"]) == 8 and (found["tokens"], found["text"]) == (plain["tokens"], plain["text"])


class Counted(Tokenizer):
    """Knows how many ids it has decoded at once."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner, self.most = inner, 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.inner.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        self.most = max(self.most, len(ids))
        return self.inner.decode(ids)


def test_a_long_text_is_not_decoded_again_and_again(corpus: Corpus) -> None:
    tokenizer = Counted(load_tokenizer(corpus.tokenizer))
    text = f"A {TEXT} and the with statement wraps\n  a block; " * 6
    ids = tokenizer.encode_batch([text])[0]
    pieces: list[str] = []
    stream = TextStream(tokenizer, ids[:3], pieces.append)
    for token in ids[3:]:
        stream.add(token)
    stream.finish()
    assert tokenizer.most < 25 < len(ids) / 4
    assert tokenizer.decode(ids[:3]) + "".join(pieces) == tokenizer.decode(ids) == text and stream.text in text


def test_a_file_gives_what_the_argument_gives(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT, encoding="utf-8")
    options = ("--max-tokens", "3", "--json")
    from_file = command("generate", str(folder), "--file", f"{tmp_path}/prompt.txt", *options)
    from_word = command("generate", str(folder), "--prompt", TEXT, *options)
    assert json.loads(from_file.out)["tokens"] == json.loads(from_word.out)["tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ids", "3 515"], "token id 515 is outside the vocabulary, 0 .. 514"),
        (["--ids", "-1 3"], "token id -1 is outside"),
        (["--ids", f"3 {2**64}"], f"token id {2**64} is outside the vocabulary, 0 .. 514"),
        (["--ids", "3 512", "--tokenizer", "CORPUS"], "token id 512 is outside the vocabulary, 0 .. 511"),
        (["--prompt", "a", "--stop", "512"], "--stop=512 is outside the vocabulary, 0 .. 511"),
        (["--ids", ""], "the prompt is empty"),
        (["--prompt", ""], "the prompt is empty"),
        (["--ids", "one"], "give token ids"),
        (["--ids", "1", "--prompt", "a"], "one of them"),
        (["--ids", "1", "--chunk", "0"], "a chunk of 0 tokens: give at least 1"),
        (["--ids", "1", "--max-tokens", "0"], "--max-tokens=0 must be at least 1"),
        (["--ids", "1", "--stop", "515"], "--stop=515 is outside the vocabulary, 0 .. 514"),
        (["--ids", "1", "--stop", "2", "--stop", "-1"], "--stop=-1 is outside the vocabulary, 0 .. 514"),
        (["--ids", "1", "--top-p", "2"], "top-p of 2.0 must be above 0"),
        (["--file", "/nowhere/prompt.txt"], "cannot read /nowhere/prompt.txt"),
        (["--prompt", "a", "--tokenizer", "/nowhere"], "no tokenizer at /nowhere"),
        (["--ids", "1", "pipeline.microbatch_group=-1"], "pipeline.microbatch_group=-1 must be above 0"),
        (["--ids", "1", "pipeline.microbatch_group=2"], "microbatch_group=2 needs the interleaved schedule"),
        (["--ids", "1", *INTERLEAVED, "pipeline.microbatch_group=4"], "pipeline.microbatch_group=4 is for training"),
        (["--ids", "1", "pipeline.timeout=0"], "pipeline.timeout=0.0 must be above 0"),
        (["--ids", "1", "parallel.tensor=2"], "1 processes for parallel.tensor=2"),
        (["--ids", "1", "parallel.pipeline=3"], "does not divide over parallel.pipeline=3"),
        (["--ids", "1", "residual=hc"], "trained with residual.architecture=block_attnres"),
        (["--ids", "1", "residual.sublayers_per_block=2"], "was trained with 3; leave it out"),
        (["--ids", "1", "model.num_layers=5"], "model.num_layers=5: checkpoint"),
    ],
)
def test_bad_input(
    folder: Path, corpus: Corpus, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before any process group starts."""
    words = [corpus.tokenizer if word == "CORPUS" else word for word in words]
    assert cli.main(["generate", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_has_nothing_to_write_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "quickstart", "--ids", "1"]) == 2
    assert "quickstart names a run's settings" in capsys.readouterr().err


def test_of_several_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    words = ["generate", str(folder), "parallel.tensor=2"]
    assert cli.main([*words, "--ids", "1 2", "--chunk", "1"]) == 2
    assert "a chunk of 1 tokens cannot be shared by parallel.tensor=2 ranks" in capsys.readouterr().err
    assert cli.main(words) == 2
    assert "2 processes cannot share standard input" in capsys.readouterr().err
