"""The plan of a run: what it holds and computes, as an object, as JSON and as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from depthbench.config.schema import RunConfig

from . import flops
from .parameters import Parameters, count_parameters
from .pipeline import EdgePlan, edge_plans


@dataclass(frozen=True)
class Flops:
    """Floating-point operations, see `flops.py` for what is counted.

    tokens: length of the sequence that `prefill_paper` and `forward_exact` stand for.
    train_per_token: forward and backward, at the model's own sequence length.
    """

    tokens: int
    prefill_paper: float
    forward_exact: float
    train_per_token: float


@dataclass(frozen=True)
class Plan:
    """tokens_per_step: over all ranks. steps: of the whole schedule."""

    run: str
    architecture: str
    parameters: Parameters
    flops: Flops
    tokens_per_step: int
    steps: int
    edges: list[EdgePlan]

    @property
    def total_tokens(self) -> int:
        return self.tokens_per_step * self.steps

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "run": self.run,
            "architecture": self.architecture,
            "parameters": {
                "total": self.parameters.total,
                "backbone": self.parameters.backbone,
                "embedding": self.parameters.embedding,
                "residual": self.parameters.residual,
            },
            "flops": {
                "tokens": self.flops.tokens,
                "prefill_paper": self.flops.prefill_paper,
                "forward_exact": self.flops.forward_exact,
                "train_per_token": self.flops.train_per_token,
            },
            "tokens": {"per_step": self.tokens_per_step, "total": self.total_tokens},
            "steps": self.steps,
            "edges": [_edge_dict(edge) for edge in self.edges],
        }


def make_plan(run: RunConfig, tokens: int | None = None) -> Plan:
    """tokens: length of the sequence whose forward FLOPs are counted; None means the model's sequence length.

    Raises UserError if `tokens` is below 1 or the residual settings cannot work at the model's shape.
    """
    counted = run.model.sequence_length if tokens is None else tokens
    return Plan(
        run=run.name,
        architecture=run.architecture,
        parameters=count_parameters(run),
        flops=Flops(
            counted, flops.prefill_paper(run, counted), flops.forward_exact(run, counted), flops.train_per_token(run)
        ),
        tokens_per_step=run.train.global_batch * run.model.sequence_length,
        steps=run.train.steps,
        edges=edge_plans(run),
    )


def _edge_dict(edge: EdgePlan) -> dict[str, Any]:
    """`from` and `to` are chunks in depth order."""
    plain = asdict(edge)
    return {"from": plain.pop("sender"), "to": plain.pop("receiver"), **plain}


def render_edges(plan: Plan) -> Table:
    """What a microbatch sends forward; its gradients send as much back."""
    table = Table(title="depth state between chunks, per microbatch and rank", title_justify="left")
    for heading in ("chunks", "stages", "live", "history", "MB", "without cache", "AttnRes paper's"):
        table.add_column(heading, justify="right")
    for edge in plan.edges:
        if edge.direction == "forward":
            sizes = (f"{size / 1e6:,.3f}" for size in (edge.bytes, edge.bytes_without_cache, edge.bytes_paper))
            counts = (str(edge.live_tensors), str(edge.history_tensors))
            stages = f"{edge.sender_stage} to {edge.receiver_stage}"
            table.add_row(f"{edge.sender} to {edge.receiver}", stages, *counts, *sizes)
    return table


def render(plan: Plan) -> Table:
    """A table for the console."""
    table = Table(title=f"{plan.run}: {plan.architecture}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    parameters, counted = plan.parameters, plan.flops
    for part in ("total", "backbone", "embedding", "residual"):
        table.add_row(f"parameters, {part}", f"{getattr(parameters, part):,}", end_section=part == "residual")
    table.add_row(f"prefill of {counted.tokens:,} tokens, paper's count", f"{counted.prefill_paper / 1e12:,.4g} TFLOPs")
    table.add_row(f"forward of {counted.tokens:,} tokens, as built", f"{counted.forward_exact / 1e12:,.4g} TFLOPs")
    table.add_row("training, a token", f"{counted.train_per_token / 1e9:,.4g} GFLOPs")
    whole_run = counted.train_per_token * plan.total_tokens
    table.add_row("training, the whole run", f"{whole_run:.3e} FLOPs", end_section=True)
    table.add_row("tokens a step", f"{plan.tokens_per_step:,}")
    table.add_row("steps", f"{plan.steps:,}")
    table.add_row("tokens in all", f"{plan.total_tokens:,}")
    return table
