"""Writes docs/architectures/: a page for every file of configs/residual/, and an index.

python docs/make_architectures.py            # rewrite what stands between the markers; make pages that are missing
python docs/make_architectures.py --check    # exit with 1 if a page is missing, left over or not up to date

What stands after the second marker (the caveats) is written by hand and kept.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from depthbench.config.load import load_run, read_yaml
from depthbench.paths import CONFIGS
from depthbench.planning.parameters import count_parameters

if TYPE_CHECKING:
    from docs.architecture_facts import LETTERS, RECIPE, SHAPE, Architecture
    from docs.make_reference import END, WIDTH, paragraphs, replaced, section
else:  # as a script, and in the tests, this folder is on the path
    from architecture_facts import LETTERS, RECIPE, SHAPE, Architecture
    from make_reference import END, WIDTH, paragraphs, replaced, section

PAGES = Path(__file__).with_name("architectures")
INDEX = "README.md"
BEGIN = "<!-- begin generated: python docs/make_architectures.py -->"
NEW_PAGE = f"{BEGIN}\n{END}\n\n## Caveats\n"
RECIPES = (RECIPE, "depthbench_1600m")
BACKBONE = ("q", "k", "v", "out", "gate", "up", "down")
BF16_BYTES = 2


def shipped() -> list[Path]:
    return sorted((CONFIGS / "residual").glob("*.yaml"))


def baseline() -> tuple[str, int]:
    """What the recipe chooses by itself, and its model's parameters."""
    chosen = read_yaml(CONFIGS / "runs" / f"{RECIPE}.yaml")["residual"]
    return str(chosen), count_parameters(load_run(RECIPE, [f"model={SHAPE}"])).total


# -- Markdown ---------------------------------------------------------------------------------------------------------
def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", line).replace("| --- ", "|---") for line in lines)


def fill(text: str, indent: str = "") -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def prose(text: str) -> str:
    """Text of a docstring as Markdown: indented blocks as code, the rest refilled and linked to arXiv."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if all(line.startswith("    ") for line in block.splitlines()):
            blocks.append(f"```\n{textwrap.dedent(block)}\n```")
            continue
        spans = block.split("`")  # every second one is code
        spans[::2] = (span.replace("*", "\\*").replace("<", "&lt;") for span in spans[::2])
        blocks.append(paragraphs(linked("`".join(spans))))
    return "\n\n".join(blocks)


def linked(text: str) -> str:
    return re.sub(r"arXiv\s+(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2g} %" if part else "0"


def more(added: int, plain: int) -> str:
    return f"{added:,} ({share(added, plain)})" if added else "0"


# -- a page -----------------------------------------------------------------------------------------------------------
def page(file: Path) -> str:
    """The generated part of an architecture's page."""
    this, path = Architecture(file), f"configs/residual/{file.name}"
    module = f"depthbench/residual/{this.module.__name__.rpartition('.')[2]}.py"
    lines = file.read_text().splitlines()
    start = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    settings = "\n".join(lines[start:])
    _, *fields = section("`residual`", type(this.run.residual))
    rates = [[f"`{recipe}`", f"{this.recipe(recipe).optimizer.lr:g}"] for recipe in RECIPES]
    parts = [
        f"# `{this.name}`",
        fill(" ".join(line.lstrip("# ") for line in lines[:start])),
        f"`residual={this.name}`, [`{module}`](../../{module}). [Index]({INDEX}).",
        "## Equation",
        prose(this.docstring),
        "## Settings",
        f"[`{path}`](../../{path}):",
        f"```yaml\n{settings}\n```",
        *fields,
        "## Parameters",
        *parameters(this),
        "## Cost",
        *cost(this),
        "## State",
        *state(this),
        "## Learning rate",
        table(["recipe", "peak"], rates),
    ]
    return "\n\n".join(part for part in parts if part)


def parameters(this: Architecture) -> Iterator[str]:
    found, counted, shape = this.parameters(), count_parameters(this.run), this.shape
    assert sum(one.count for one in found) == counted.residual, f"{this.name}: num_parameters() is not what it builds"
    sizes = ", ".join(f"{letter} = {getattr(shape, field)}" for letter, (field, _) in LETTERS.items())
    yield fill(
        f"At {SHAPE}: {shape.num_layers} blocks, so sublayers 0-{shape.num_sublayers - 1} (attention of block i is 2i, "
        f"its MLP 2i + 1); {sizes} (hidden, heads, KV heads, head size). Names follow "
        "`blocks.<i>.attention_residual.`, `blocks.<i>.mlp_residual.` or `readout.`; those with `mlp.` follow "
        "`blocks.<i>.` and are parts of the MLP's first matmul. decay: weight decay applies. float32: stored so in "
        "bfloat16 models too."
    )
    rows, notes, words = [], [], ("no", "yes")
    for one in found:
        values = list(one.values.items())
        value = values[0][1]
        if len(set(one.values.values())) > 1:
            notes += [f"- `{one.name}` of sublayer {place}: {said}" for place, said in values[:3]]
            value = "below"
        elif value.startswith("["):
            notes.append(f"- `{one.name}`: {value}")
            value = "below"
        tail = [words[one.decay], words[one.float32], f"{one.count:,}"]
        rows.append([f"`{one.name}`", one.shape, this.where(one.values), value, *tail])
    yield table(["parameter", "shape", "where", "initial value", "decay", "float32", "in all"], rows)
    if notes:
        yield "Initial values:"
        yield "\n".join(notes)
    scaled: dict[float, list[str]] = {}
    for projection in BACKBONE:
        scaled.setdefault(this.residual.init_scale(projection), []).append(f"`{projection}`")
    for scale, names in scaled.items():
        if scale != 1:
            std = this.run.model.init_std
            yield fill(f"Backbone weights {', '.join(names)} start with deviation {scale:.4g} x {std:g}.")
    base, plain = baseline()
    totals = {
        "residual, norms included": f"{counted.residual:,}",
        "whole model": f"{counted.total:,}",
        f"more than `{base}`": more(counted.total - plain, plain),
    }
    yield table(["", "parameters"], ([*row] for row in totals.items()))


def cost(this: Architecture) -> Iterator[str]:
    flops, rest = this.residual.flops_per_token(), this.rest_of_forward()
    yield fill(
        f"Forward FLOPs per token of the residual path at {SHAPE}; multiply-add is 2, norms, softmax and element-wise "
        f"work are not counted. The rest of the forward pass (attention, MLPs, LM head at every position; sequences of "
        f"{this.run.model.sequence_length:,}) is {rest:,.0f}."
    )
    counts = {"as built": flops.exact, "as the DepthBench paper counts": flops.paper}
    yield table(["", "FLOPs", "of the rest"], ([said, f"{n:,.0f}", share(n, rest)] for said, n in counts.items()))


def state(this: Architecture) -> Iterator[str]:
    largest = "the readout" if this.largest == this.shape.num_sublayers else f"sublayer {this.largest}"
    depths = {this.middle: f"sublayer {this.middle}, the middle"}
    depths.setdefault(this.largest, f"{largest}, the largest")
    if len(set(this.states)) == 1:
        depths = {this.middle: "every sublayer and the readout"}
    yield fill(
        "Tensors are [S, B, ...] with the shape below. Placement `tokens`: divided over tensor-parallel ranks along "
        "the sequence under sequence parallelism; `kv_heads`: by head, always."
    )
    rows, sums = [], []
    for sublayer, before in depths.items():
        for kind in ("live", "history"):
            rows += [[before, kind, *tensor] for tensor in this.tensors(sublayer, kind)]
        sums.append([before, this.in_hidden_states(sublayer), f"{BF16_BYTES * this.elements(sublayer):,}"])
    yield table(["before", "kind", "tensors", "shape", "placement"], rows)
    yield table(["before", "in all, in [S, B, D]", "bytes per token in bfloat16"], sums)


# -- the index --------------------------------------------------------------------------------------------------------
def index(files: list[Path]) -> str:
    base, plain = baseline()
    rows = []
    for file in files:
        this = Architecture(file)
        added, flops = count_parameters(this.run).total - plain, this.residual.flops_per_token().exact
        cells = [this.held("live"), this.held("history"), more(added, plain), this.in_hidden_states(this.middle)]
        cells += [share(flops, this.rest_of_forward()), f"{this.run.optimizer.lr:g}", linked(this.source)]
        rows.append([f"[`{this.name}`]({this.name}.md)", *cells])
    legend = (
        f"- Figures are those of {SHAPE} with the settings of the file. D hidden, H heads, G KV heads, K head size.",
        "- live, history: tensors of the depth state, [S, B, ...]. Live ones are replaced as depth goes on; history is "
        "made once and read by later sublayers. `x n`: n of them over the whole depth.",
        f"- extra parameters: more than `{base}` has.",
        "- middle edge: the state between the two halves of the blocks, in multiples of one [S, B, D] tensor.",
        "- FLOPs: of the residual path, over those of the rest of the forward pass.",
        f"- learning rate: peak in `{RECIPE}`.",
    )
    intro = (
        "One page for each file of `configs/residual/`: equation, settings, parameters, cost, state, and what to "
        "beware of. Choose one with `residual=NAME`."
    )
    header = ["architecture", "live", "history", "extra parameters", "middle edge", "FLOPs", "learning rate", "source"]
    items = "\n".join(fill(line, "  ") for line in legend)
    return "\n\n".join(["# Architectures", fill(intro), table(header, rows), items])


# -- files ------------------------------------------------------------------------------------------------------------
def text_of(path: Path, new: str = "") -> str:
    return path.read_text() if path.exists() else new


def wanted() -> dict[Path, str]:
    """Every file of docs/architectures/ as it should be."""
    files = shipped()
    pages = {PAGES / f"{file.stem}.md": page(file) for file in files}
    pages = {path: replaced(text_of(path, NEW_PAGE), BEGIN, generated, path.name) for path, generated in pages.items()}
    own = PAGES / INDEX
    return {own: replaced(text_of(own, f"{BEGIN}\n{END}\n"), BEGIN, index(files), INDEX), **pages}


def stale() -> list[str]:
    """What is wrong with the files that there are."""
    pages = wanted()
    wrong = [f"{path.name} is not up to date" for path, text in pages.items() if text_of(path) != text]
    return wrong + [f"{path.name} is left over" for path in sorted(PAGES.glob("*.md")) if path not in pages]


def main() -> int:
    if "--check" in sys.argv[1:]:
        wrong = stale()
        if wrong:
            print(f"{'; '.join(wrong)}: run python docs/make_architectures.py", file=sys.stderr)
        return int(bool(wrong))
    PAGES.mkdir(exist_ok=True)
    for path, text in wanted().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
