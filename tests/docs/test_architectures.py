"""docs/architectures/: one page a shipped architecture, up to date, with caveats, and an index of all; an eleventh
architecture gets its page from the same code."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthbench.paths import CONFIGS
from depthbench.residual import Residual
from depthbench.residual.hidden import HiddenReadout
from depthbench.residual.norms import RMSNorm
from depthbench.residual.parameters import constant, fixed, residual_parameter, truncated_normal
from depthbench.residual.protocol import Connection, Cost, ExtraProjection, Read, Shape
from depthbench.residual.state import DepthState, Placement, StateSpec, TensorSpec

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "architectures"
SHIPPED = sorted(path.stem for path in (CONFIGS / "residual").glob("*.yaml"))


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("make_architectures")


def test_the_pages_are_up_to_date(script: Any) -> None:
    assert not script.stale(), "run python docs/make_architectures.py"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_page_has_caveats(name: str, script: Any) -> None:
    _, generated, by_hand = (PAGES / f"{name}.md").read_text().partition(script.END)
    assert generated
    _, heading, caveats = by_hand.partition("\n## Caveats\n")
    assert heading
    assert "\n- " in caveats, f"{name}.md: write down what to beware of, as a list"


def test_the_index_lists_every_page() -> None:
    index = (PAGES / "README.md").read_text()
    assert [name for name in SHIPPED if f"[`{name}`]({name}.md)" not in index] == []


def test_the_code_names_no_architecture() -> None:
    names = {*SHIPPED, *Residual.registry}
    for file in ("make_architectures.py", "architecture_facts.py"):
        text = (ROOT / "docs" / file).read_text()
        assert [name for name in names if f'"{name}"' in text or f"`{name}`" in text] == []


# -- a page that is missing, changed or left over ---------------------------------------------------------------------
@pytest.fixture
def copied(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's folder for one shipped architecture, empty."""
    monkeypatch.setattr(script, "PAGES", tmp_path / "architectures")
    monkeypatch.setattr(script, "shipped", lambda: [CONFIGS / "residual" / f"{SHIPPED[0]}.yaml"])
    return tmp_path / "architectures"


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_architectures.py", *words])
    status: int = script.main()
    return status


def test_what_is_written_by_hand_is_kept(
    script: Any, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied / f"{SHIPPED[0]}.md"
    assert run(script, monkeypatch, "--check") == 1
    assert f"README.md is not up to date; {path.name} is not up to date: run python" in capsys.readouterr().err
    assert not copied.exists()

    assert run(script, monkeypatch) == 0
    new = path.read_text()
    assert new.endswith(f"{script.END}\n\n## Caveats\n")
    path.write_text(new.replace("## Equation", "## Formula") + "\n- By hand.\n")
    assert run(script, monkeypatch, "--check") == 1
    assert capsys.readouterr().err.startswith(f"{path.name} is not up to date:")
    assert run(script, monkeypatch) == 0
    assert path.read_text() == new + "\n- By hand.\n"
    assert run(script, monkeypatch, "--check") == 0

    (copied / "gone.md").write_text("An architecture that is no longer shipped.\n")
    assert run(script, monkeypatch, "--check") == 1
    assert capsys.readouterr().err.startswith("gone.md is left over:")


# -- an eleventh architecture -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OddConfig:
    streams: int = 3  # how many
    norm_eps: float = 1e-6


class OddConnection(Connection):
    def __init__(self, sublayer: int, shape: Shape, cfg: OddConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, cfg.norm_eps, dtype)
        if sublayer % 2:
            values = torch.arange(3.0) + sublayer
            self.gains = residual_parameter((3,), fixed(values), dtype=dtype, decay=False, keep_float32=True)
        if sublayer in (0, 4):
            size = (cfg.streams * shape.hidden_size, shape.num_heads + 1)
            self.mixer = residual_parameter(size, truncated_normal(0.5), dtype=dtype)
            self.middle = residual_parameter((shape.num_kv_heads * shape.head_dim,), constant(0.5), dtype=dtype)

    def read(self, state: DepthState) -> Read:
        raise NotImplementedError

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Any) -> DepthState:
        raise NotImplementedError


@pytest.fixture
def odd(tmp_path: Path) -> Iterator[Path]:
    """An architecture with something of everything that pages show. Yields its YAML."""

    class Odd(Residual, name="odd"):
        Config = OddConfig
        config: OddConfig

        def start(self, embedding: Tensor) -> DepthState:
            raise NotImplementedError

        def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
            return OddConnection(sublayer, self.shape, self.config, dtype)

        def readout(self, dtype: torch.dtype) -> nn.Module:
            return HiddenReadout(self.shape.hidden_size, self.config.norm_eps, dtype)

        def state_at(self, sublayer: int) -> StateSpec:
            width = (self.shape.hidden_size,)
            kept = (TensorSpec(f"kept.{n}", (2, *width)) for n in range(min(sublayer, 3)))
            heads = TensorSpec("heads", (self.shape.num_kv_heads, self.shape.head_dim), Placement.KV_HEADS)
            return StateSpec((TensorSpec("h", width),), (*kept, heads))

        def num_parameters(self) -> int:
            shape, wide = self.shape, self.config.streams * self.shape.hidden_size
            once = wide * (shape.num_heads + 1) + shape.num_kv_heads * shape.head_dim
            norms = (shape.num_sublayers + 1) * shape.hidden_size
            return norms + 3 * shape.num_layers + 2 * once + 5 * shape.hidden_size

        def flops_per_token(self) -> Cost:
            return Cost(1000, 2000)

        def probe(self, state: DepthState) -> Tensor:
            raise NotImplementedError

        def extra_projections(self, block: int) -> tuple[ExtraProjection, ...]:
            return (ExtraProjection("extra", 5),) if block == 7 else ()

        def init_scale(self, projection: str) -> float:
            return 0.25 if projection in ("q", "extra") else 1.0

    file = tmp_path / "odd_residual.yaml"
    file.write_text("# Odd: for a test,\n# in two lines.\narchitecture: odd\nstreams: 4\n")
    yield file
    del Residual.registry["odd"]


def test_an_eleventh_architecture_gets_its_page(script: Any, odd: Path) -> None:
    page = script.page(odd)
    for line in (
        "# `odd_residual`",
        "Odd: for a test, in two lines.",
        "```yaml\narchitecture: odd\nstreams: 4\n```",
        "| `streams` | int | 3 | how many |",
        # heads + 1 is in proportion to nothing, so it is a number; a deviation is that of the values drawn
        "| `mixer` | [4 D, 17] | attention of blocks 0, 2 | random, deviation 0.49 | yes | no | 139,264 |",
        "| `middle` | [G K] | attention of blocks 0, 2 | 0.5 | yes | no | 2,048 |",
        "| `gains` | [3] | every MLP | below | no | yes | 72 |",
        "- `gains` of sublayer 3: [3, 4, 5]",
        "| `norm.weight` | [D] | every sublayer | 1 | yes | no | 49,152 |",
        "| `norm.weight` | [D] | readout | 1 | yes | no | 1,024 |",
        "| `mlp.extra.weight` | [5, D] | sublayer 15 | random, deviation 0.005 | yes | no | 5,120 |",
        "Backbone weights `q` start with deviation 0.25 x 0.02.",
        "| as the DepthBench paper counts | 2,000 | 0.00025 % |",
        "| sublayer 24, the middle | history | `kept.0` to `2` | [2, D] | tokens |",
        "| sublayer 24, the middle | history | `heads` | [G, K] | kv_heads |",
        "| sublayer 3, the largest | 8 | 16,384 |",
        "| `depthbench_400m` | 0.002 |",
    ):
        assert f"{line}\n" in f"{page}\n"


def test_an_eleventh_architecture_gets_its_line(script: Any, odd: Path) -> None:
    (line,) = (line for line in script.index([odd]).splitlines() if line.startswith("| [`odd_residual`]"))
    cells = line.strip("| ").split(" | ")
    assert cells[1:3] == ["`h` [D]", "`heads` [G, K], `kept` [2, D] x 3"]
    assert cells[4:] == ["8", "0.00012 %", "0.002", "-"]


def test_a_wrong_count_of_parameters_is_noticed(script: Any, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residual.registry["odd"], "num_parameters", lambda self: 1)
    with pytest.raises(AssertionError, match=r"odd_residual: num_parameters\(\) is not what it builds"):
        script.page(odd)


def test_docstrings_become_markdown(script: Any) -> None:
    text = "Name: a < b, `c < d`, 2 * 3.\n\n    h <- h + y\n        deeper\n\nSource: arXiv\n2409.19606 here.\n"
    assert script.prose(text).split("\n\n") == [
        "Name: a &lt; b, `c < d`, 2 \\* 3.",
        "```\nh <- h + y\n    deeper\n```",
        "Source: [arXiv 2409.19606](https://arxiv.org/abs/2409.19606) here.",
    ]
