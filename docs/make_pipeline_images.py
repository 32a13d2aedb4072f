"""Draws docs/images/pipeline_*.png and rewrites the tables of docs/pipeline.md, from the product's own plans.

python docs/make_pipeline_images.py            # rewrite; needs matplotlib
python docs/make_pipeline_images.py --check    # exit with 1 if a table is not up to date; pictures are not compared
"""

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from rich.console import Console

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, local_share, residual_of
from depthbench.pipeline.edges import edges, retentions
from depthbench.planning.pipeline import cached_bytes, edge_plans
from depthbench.planning.plan import make_plan
from depthbench.planning.render import render_edges
from depthbench.residual.state import TensorSpec

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from docs.make_architectures import shipped, table
    from docs.make_reference import settle
else:  # as a script, this folder is on the path
    from make_architectures import shipped, table
    from make_reference import settle

PAGE = Path(__file__).with_name("pipeline.md")
IMAGES = Path(__file__).with_name("images")
BLOCK = re.compile(
    r"(<!-- begin generated: python docs/make_pipeline_images\.py (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL
)

RECIPE, STAGES, VIRTUAL = "depthbench_400m", 4, 2
LAYOUT = [f"parallel.pipeline={STAGES}", f"parallel.virtual_pipeline={VIRTUAL}"]
FULL, BLOCK_ATTNRES = "full_attnres", "block_attnres"
SENT, MADE, LIVE, PAPER, AGAIN = "#2b6cb0", "#2a9d8f", "#8e6bbf", "#f0a13a", "#c9ced6"
GRADIENT, INK = "#c0392b", "#333333"
plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def run_of(residual: str, *words: str) -> RunConfig:
    """The recipe over the stages of this page."""
    return load_run(RECIPE, [f"residual={residual}", *LAYOUT, *words])


def example(sublayers_per_block: int) -> "Flow":
    """Eight transformer blocks, one a chunk."""
    blocks = ["residual.num_blocks=null"] if sublayers_per_block > 1 else []
    chosen = BLOCK_ATTNRES if sublayers_per_block > 1 else FULL
    words = ["model.num_layers=8", *blocks, f"residual.sublayers_per_block={sublayers_per_block}"]
    return Flow(run_of(chosen, *words))


def short(name: str) -> str:
    return name.replace("source.", "b")


class Flow:
    """What one microbatch of a run carries over its edges and leaves in the stages' caches."""

    def __init__(self, run: RunConfig) -> None:
        self.layout, residual = layout_of(run), residual_of(run)
        self.edges = edges(residual, self.layout, cache=True)
        self.kept = retentions(residual, self.layout, cache=True)
        states = [residual.state_at(self.layout.sublayer(chunk)) for chunk in range(self.layout.num_chunks + 1)]
        before = [{spec.name for spec in state.history} for state in states]
        before[0] = set()  # the first chunk makes the embedding
        chunks = range(self.layout.num_chunks)
        self.made = [sorted(before[chunk + 1] - before[chunk]) for chunk in chunks]

    def stage(self, chunk: int) -> int:
        return chunk % self.layout.num_stages

    def arrived(self, chunk: int) -> set[str]:
        return {spec.name for spec in self.edges[chunk - 1].history} if chunk else set()

    def cached(self) -> Iterator[tuple[str, int, int]]:
        """(name, chunk that puts it into its stage's cache, chunk that takes it last)."""
        chunks = range(self.layout.num_chunks)
        for first in chunks:
            later = [c for c in chunks if c > first and self.stage(c) == self.stage(first)]
            for name in sorted(self.kept[first].kept):
                yield name, first, next(c for c in later if name in self.kept[c].last)

    def counts(self) -> dict[str, list[int]]:
        """History tensors of each edge."""
        kinds = {"sent": "history", "the paper's scheme": "paper", "without a cache": "whole"}
        return {said: [len(getattr(edge, kind)) for edge in self.edges] for said, kind in kinds.items()}


# -- tables -----------------------------------------------------------------------------------------------------------
def plan_excerpt() -> str:
    """As `depthbench plan` prints it."""
    console = Console(file=io.StringIO(), width=90)
    console.print(render_edges(make_plan(run_of(BLOCK_ATTNRES))))
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def headed(*first: str) -> list[str]:
    return [*first, *(f"{chunk - 1} → {chunk}" for chunk in range(1, STAGES * VIRTUAL)), "sum"]


def arithmetic() -> str:
    rows = []
    for said, length in (("blocks of two chunks", 4), ("Full AttnRes", 1)):
        for kind, found in example(length).counts().items():
            rows.append([said, kind, *map(str, found), f"**{sum(found)}**"])
    return table(headed("", "history tensors"), rows)


def architectures() -> str:
    """One row for those that carry the same."""
    found: dict[tuple[str, ...], list[str]] = {}
    for file in shipped():
        run = run_of(str(file))
        between = Flow(run).edges
        live = dict.fromkeys(units(run, edge.live) for edge in between)
        history = [units(run, edge.history) for edge in between]
        sums = [
            units(run, tuple(spec for edge in between for spec in (*edge.live, *getattr(edge, kind))))
            for kind in ("history", "paper", "whole")
        ]
        found.setdefault((" or ".join(live), *history, *sums), []).append(f"`{file.stem}`")
    header = [*headed("`residual=`", "live"), "paper's scheme", "without cache"]
    return table(header, [[", ".join(names), *row] for row, names in found.items()])


def units(run: RunConfig, specs: tuple[TensorSpec, ...]) -> str:
    """In multiples of one [S, B, D]."""
    local = local_share(run)
    return f"{local.numel(*specs) / local.numel(TensorSpec('', (run.model.hidden_size,))):g}"


def caches() -> str:
    """The most that each stage's cache holds, of a step on as many processes as stages."""
    rows = []
    for name in (FULL, BLOCK_ATTNRES, "moda"):
        run = run_of(name)
        held = [f"{size / 1e9:.2f}" for size in cached_bytes(run, STAGES)]
        rows.append([f"`{name}`", str(run.train.micro_batch), *held])
    return table(["`residual=`", "`micro_batch`", *(f"stage {stage}, GB" for stage in range(STAGES))], rows)


BLOCKS = {"plan": plan_excerpt, "arithmetic": arithmetic, "architectures": architectures, "caches": caches}


def updated(page: str) -> str:
    """`page` with the text between its markers replaced."""
    names = [found[2] for found in BLOCK.finditer(page)]
    assert sorted(names) == sorted(BLOCKS), f"{PAGE} has markers for {names}, there are {list(BLOCKS)}"
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n\n{found[3]}", page)


# -- pictures ---------------------------------------------------------------------------------------------------------
def save(figure: Any, name: str) -> None:
    figure.savefig(IMAGES / f"pipeline_{name}.png", dpi=100, metadata={"Software": None})
    plt.close(figure)


def lanes(axes: Any, flow: Flow, *, notes: bool = True) -> None:
    """A lane for each stage, with its chunks where a microbatch comes to them."""
    stages, chunks = flow.layout.num_stages, flow.layout.num_chunks
    for stage in range(stages):
        axes.axhspan(stage - 0.45, stage + 0.45, color="#f4f5f7", zorder=0)
    for chunk in range(chunks):
        axes.text(
            chunk,
            flow.stage(chunk) - 0.2,
            "\n".join([f"chunk {chunk}", *(f"makes {short(name)}" for name in flow.made[chunk] if notes)]),
            ha="center",
            va="center",
            fontsize=9,
            zorder=5,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": INK},
        )
    axes.set(ylim=(stages - 0.5, -0.5), xlim=(-0.6, chunks - 0.4))
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    look = {"arrowstyle": "-|>", "lw": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13, **style}
    axes.annotate("", end, start, arrowprops=look, zorder=4)


def hop(axes: Any, flow: Flow, sender: int, receiver: int, **style: Any) -> None:
    """An arrow from chunk to chunk, from side to side of their boxes."""
    way = 1 if receiver > sender else -1
    ends = [(chunk + 0.32 * side, flow.stage(chunk) - 0.2) for chunk, side in ((sender, way), (receiver, -way))]
    arrow(axes, *ends, **style)


def draw_flow(flow: Flow) -> None:
    """What crosses each edge, and what each stage has in its cache meanwhile."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 7.6), layout="constrained", height_ratios=[2.2, 4])
    names = list(dict.fromkeys(spec.name for edge in flow.edges for spec in (*edge.live, *edge.whole)))
    names.sort(key=lambda name: (name.startswith("source"), name))
    totals = dict.fromkeys((LIVE, SENT, PAPER, AGAIN), 0)
    for edge in flow.edges:
        for spec in (*edge.live, *edge.whole):
            color = next(
                color
                for color, group in ((LIVE, edge.live), (SENT, edge.history), (PAPER, edge.paper), (AGAIN, edge.whole))
                if spec in group
            )
            totals[color] += 1
            above.text(
                edge.receiver - 0.5,
                names.index(spec.name),
                short(spec.name),
                ha="center",
                va="center",
                color="white" if color in (LIVE, SENT) else INK,
                bbox={"boxstyle": "round,pad=0.3", "facecolor": color, "edgecolor": "none"},
            )
    sent, paper, again = totals[SENT], totals[PAPER], totals[AGAIN]
    count = sent + paper + again
    handles = [
        Patch(color=LIVE, label=f"live, always sent: {totals[LIVE]}"),
        Patch(color=SENT, label=f"history that the stage lacks, sent: {sent}"),
        Patch(color=PAPER, label=f"not sent; by the paper's figure also sent: {sent} + {paper} = {sent + paper}"),
        Patch(color=AGAIN, label=f"not sent; without a cache also sent: {sent} + {paper} + {again} = {count}"),
    ]
    above.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False, fontsize=9.5)
    above.set(ylim=(len(names) - 0.4, -0.6), xlim=(-0.6, flow.layout.num_chunks - 0.4), ylabel="tensor")
    above.set_yticks(range(len(names)), [short(name) for name in names])
    above.set_xticks([edge.receiver - 0.5 for edge in flow.edges], [f"{e.sender} → {e.receiver}" for e in flow.edges])
    above.set_xlabel("message, from chunk to chunk")
    above.tick_params(length=0)
    for edge in flow.edges:
        above.axvline(edge.receiver, color="#e3e5e9", lw=0.8, zorder=0)

    lanes(below, flow)
    for edge in flow.edges:
        hop(below, flow, edge.sender, edge.receiver, color=INK)
    used: dict[int, int] = {}
    for name, first, last in flow.cached():
        row = used[first] = used.get(first, -1) + 1
        y = flow.stage(first) + 0.09 + 0.145 * row
        color = SENT if name in flow.arrived(first) else MADE
        below.plot([first + 0.42, last - 0.42], [y, y], color=color, lw=10, solid_capstyle="round", zorder=3)
        below.text((first + last) / 2, y, short(name), color="white", va="center", ha="center", fontsize=9, zorder=6)
    handles = [
        Patch(color=SENT, label="cached, came in a message"),
        Patch(color=MADE, label="cached, made on this stage"),
    ]
    below.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False, fontsize=9.5)
    save(figure, "flow")


def draw_bytes() -> None:
    """Bars of each edge's bytes, in three ways."""
    figure, both = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained")
    for axes, name, title in zip(both, (FULL, BLOCK_ATTNRES), ("Full AttnRes", "Block AttnRes, 8 blocks"), strict=True):
        run = run_of(name)
        plans = [edge for edge in edge_plans(run) if edge.direction == "forward"]
        ways = (
            ("without a cache", AGAIN, [edge.bytes_without_cache for edge in plans]),
            ("the AttnRes paper's scheme", PAPER, [edge.bytes_paper for edge in plans]),
            ("sent", SENT, [edge.bytes for edge in plans]),
        )
        for number, (said, color, sizes) in enumerate(ways):
            at = [edge.receiver - 0.5 + 0.27 * (number - 1) for edge in plans]
            label = f"{said}: {sum(sizes) / 1e9:.2f} GB in all"
            axes.bar(at, [size / 1e9 for size in sizes], 0.25, color=color, label=label)
        axes.set_xticks([edge.receiver - 0.5 for edge in plans], [f"{e.sender} → {e.receiver}" for e in plans])
        axes.set(title=title, xlabel="message, from chunk to chunk", ylabel="GB a microbatch, one direction")
        axes.legend(frameon=False, fontsize=9.5)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    save(figure, "bytes")


def draw_gradient(flow: Flow, name: str) -> None:
    """The way of one tensor's gradient from its readers to the chunk that made it."""
    figure, axes = plt.subplots(figsize=(11, 4.4), layout="constrained")
    lanes(axes, flow, notes=False)
    maker = next(chunk for chunk, names in enumerate(flow.made) if name in names)
    for edge in flow.edges:
        if name in {spec.name for spec in edge.history}:
            hop(axes, flow, edge.receiver, edge.sender, color=GRADIENT, lw=2)
    for found, first, last in flow.cached():
        if found == name:
            y = flow.stage(first) - 0.02
            style = {"color": GRADIENT, "ls": (0, (4, 2)), "lw": 1.6, "connectionstyle": "arc3,rad=-0.12"}
            arrow(axes, (last, y), (first, y), **style)
    axes.text(
        maker - 0.35,
        flow.stage(maker) - 0.2,
        f"makes {short(name)}: its gradient\nis complete here",
        ha="right",
        va="center",
        fontsize=9,
        color=GRADIENT,
    )
    axes.plot([], [], color=GRADIENT, lw=2, label=f"part of a message: gradient of {short(name)}")
    axes.plot([], [], color=GRADIENT, ls=(0, (4, 2)), label="added up in the stage's cache, without a message")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False, fontsize=9.5)
    axes.set_title("← backward runs this way", loc="right", fontsize=10)
    save(figure, "gradient")


def main() -> int:
    status = settle(PAGE, updated(PAGE.read_text()))
    if "--check" in sys.argv[1:]:
        return status
    two_chunks = example(4)
    draw_flow(two_chunks)
    draw_gradient(two_chunks, "source.1")
    draw_bytes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
