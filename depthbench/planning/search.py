"""The fastest layouts of a run that fit, for several numbers of GPUs.

All layouts are estimated in closed form; going from the fastest on, those that fit are simulated until there are
enough. (What a rank holds is asked of the caller, and only as often as that needs.)
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run
from depthbench.errors import UserError
from depthbench.model.recompute import Recompute
from depthbench.pipeline.layout import balanced

from .cluster import Cluster
from .pipeline import EdgePlan, edge_plans
from .time import Counted, StepModel, StepTime
from .work import chunk_work

MemoryOf = Callable[[RunConfig, int], int]
"""(run, processes) -> bytes that the fullest rank needs at its peak."""

GPUS = tuple(2**n for n in range(3, 11))  # 8 to 1024
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
VIRTUAL = (1, 2, 3, 4, 5)
MICRO_BATCH = (1, 2, 4, 8, 16, 32)

INDIVISIBLE_GPUS = "GPUs are no multiple of tensor x pipeline ranks"
INDIVISIBLE_MODEL = "heads or FFN width do not divide over tensor ranks"
INDIVISIBLE_BATCH = "the batch does not divide into equal microbatches"
TOO_FEW_MICROBATCHES = "fewer microbatches than stages"
INDIVISIBLE_GROUPS = "microbatches do not divide into groups of one a stage"
TOO_LARGE = "estimated to be faster, and do not fit"


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its predicted step. memory: bytes of the fullest rank."""

    gpus: int
    run: RunConfig
    memory: int
    time: StepTime

    @property
    def replicas(self) -> int:
        return self.gpus // (self.run.parallel.tensor * self.run.parallel.pipeline)

    @property
    def overrides(self) -> list[str]:
        """`key=value` words that give the run this layout."""
        parallel, pipeline = self.run.parallel, self.run.pipeline
        blocks = "null" if pipeline.blocks_per_chunk is None else str(pipeline.blocks_per_chunk).replace(" ", "")
        return [
            f"parallel.tensor={parallel.tensor}",
            f"parallel.sequence={str(parallel.sequence).lower()}",
            f"parallel.pipeline={parallel.pipeline}",
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}",
            f"parallel.recompute={parallel.recompute.value}",
            f"pipeline.blocks_per_chunk={blocks}",
            "pipeline.microbatch_group=null",
            f"pipeline.overlap_p2p={str(pipeline.overlap_p2p).lower()}",
            f"train.micro_batch={self.run.train.micro_batch}",
        ]


@dataclass(frozen=True)
class Search:
    """choices: of each number of GPUs, the fastest first. refused: of each, how many layouts were not possible, by
    reason."""

    run: str
    cluster: Cluster
    choices: dict[int, list[Choice]]
    refused: dict[int, dict[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Seconds, bytes."""
        choices = [choice for found in self.choices.values() for choice in found]
        refused = [{"gpus": gpus, "reasons": reasons} for gpus, reasons in self.refused.items()]
        return {
            "run": self.run,
            "device": self.cluster.device,
            "choices": [
                {"gpus": c.gpus, "overrides": c.overrides, "memory": c.memory, "time": c.time.as_dict()}
                for c in choices
            ],
            "refused": refused,
        }

    def render(self) -> Table:
        """A table for the console."""
        table = Table(title=f"{self.run}: fastest layouts on {self.cluster.device}", title_justify="left")
        for heading in ("GPUs", "tensor", "pipeline", "chunks", "data", "micro", "recompute"):
            table.add_column(heading, justify="right")
        for heading in ("GiB", "step, s", "bubble", "MFU", "tokens/s", "GPU-hours"):
            table.add_column(heading, justify="right")
        for gpus, found in self.choices.items():
            for c in found:
                parallel, time = c.run.parallel, c.time
                layout = (gpus, parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, c.replicas)
                table.add_row(
                    *map(str, (*layout, c.run.train.micro_batch, parallel.recompute.value)),
                    f"{c.memory / 2**30:.1f}",
                    f"{time.step:.3f}",
                    f"{time.bubble:.1%}",
                    f"{time.mfu:.1%}",
                    f"{time.tokens_per_second:,.0f}",
                    f"{time.gpu_hours:,.0f}",
                    end_section=c is found[-1],
                )
        table.caption = "\n".join(self._nothing_for(gpus) for gpus, found in self.choices.items() if not found) or None
        table.caption_justify = "left"
        return table

    def _nothing_for(self, gpus: int) -> str:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in self.refused[gpus].items())
        return f"{gpus} GPUs: no layout. {reasons}"


def search(
    run: RunConfig,
    cluster: Cluster,
    memory_of: MemoryOf,
    gpus: Sequence[int] | None = None,
    simulated: int = 12,
    shown: int = 3,
) -> Search:
    """gpus: numbers to look at; None means GPUS in whole nodes. simulated, shown: layouts of each number.

    The run's batch, model, optimizer and data-parallel settings stay as they are; messages overlap wherever the
    schedule can. Raises UserError where the run could not start under any layout.
    """
    counts = [count for count in GPUS if count % cluster.gpus_per_node == 0] if gpus is None else gpus
    for count in counts:
        if count < 1:
            raise UserError(f"{count} GPUs: give at least 1")
    check_run(_laid_out(run, 1, 1, 1, 1, Recompute.NONE), 1)
    known: dict[tuple[Any, ...], Counted] = {}
    edges: dict[tuple[Any, ...], list[EdgePlan]] = {}  # whatever is recomputed
    result = Search(run.name, cluster, {}, {})
    for count in counts:
        refused: Counter[str] = Counter()
        models: list[tuple[float, int, StepModel]] = []  # the number decides between equal estimates
        for layout, candidate in _layouts(run, cluster):
            reason = _refusal(candidate, count)
            if reason:
                refused[reason] += 1
                continue
            if layout not in known:
                if layout[:-1] not in edges:
                    edges[layout[:-1]] = edge_plans(candidate)
                known[layout] = Counted(chunk_work(candidate), edges[layout[:-1]])
            model = StepModel(candidate, cluster, count, known[layout])
            models.append((model.estimate(), len(models), model))
        fitting: list[Choice] = []
        for _, _, model in sorted(models):
            memory = memory_of(model.run, count)
            if memory > cluster.memory:
                refused[TOO_LARGE] += 1
                continue
            fitting.append(Choice(count, model.run, memory, model.predict()))
            if len(fitting) == simulated:
                break
        result.choices[count] = sorted(fitting, key=lambda choice: choice.time.step)[:shown]
        result.refused[count] = dict(refused)
    return result


def _layouts(run: RunConfig, cluster: Cluster) -> Iterator[tuple[tuple[Any, ...], RunConfig]]:
    """All that are tried, as keys, and the run with each."""
    for tensor in (t for t in TENSOR if t <= cluster.gpus_per_node):
        for pipeline in PIPELINE:
            for virtual in VIRTUAL if pipeline > 1 else (1,):
                if pipeline * virtual > run.model.num_layers:
                    continue
                for micro_batch in MICRO_BATCH:
                    for recompute in Recompute:
                        layout = (tensor, pipeline, virtual, micro_batch, recompute)
                        yield layout, _laid_out(run, *layout)


def _laid_out(
    run: RunConfig, tensor: int, pipeline: int, virtual: int, micro_batch: int, recompute: Recompute
) -> RunConfig:
    layers, chunks = run.model.num_layers, pipeline * virtual
    return replace(
        run,
        parallel=replace(
            run.parallel,
            tensor=tensor,
            sequence=tensor > 1,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            recompute=recompute,
        ),
        pipeline=replace(
            run.pipeline,
            blocks_per_chunk=list(balanced(layers, chunks)) if layers % chunks else None,
            microbatch_group=None,
            overlap_p2p=virtual > 1,
        ),
        train=replace(run.train, micro_batch=micro_batch),
    )


def _refusal(run: RunConfig, gpus: int) -> str | None:
    """Why a run cannot have its layout on so many GPUs; a reason that counts layouts, where `check_run` names one."""
    parallel, train = run.parallel, run.train
    replicas, left = divmod(gpus, parallel.tensor * parallel.pipeline)
    if left:
        return INDIVISIBLE_GPUS
    divided = (run.model.num_attention_heads, run.model.kv_heads, run.model.ffn_hidden_size)
    if any(count % parallel.tensor for count in divided):
        return INDIVISIBLE_MODEL
    count, left = divmod(train.global_batch, train.micro_batch * replicas)
    if left:
        return INDIVISIBLE_BATCH
    if count < parallel.pipeline:
        return TOO_FEW_MICROBATCHES
    if parallel.virtual_pipeline > 1 and count % parallel.pipeline:
        return INDIVISIBLE_GROUPS
    try:
        check_run(run, gpus)
    except UserError as error:
        return str(error)
    return None
