"""A plan as tables for the console."""

from rich.table import Table

from .plan import Plan


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
    table.add_row("key-value cache of such a sequence", f"{plan.kv_cache_bytes / 2**20:,.4g} MiB")
    table.add_row("training, a token", f"{counted.train_per_token / 1e9:,.4g} GFLOPs")
    whole_run = counted.train_per_token * plan.total_tokens
    table.add_row("training, the whole run", f"{whole_run:.3e} FLOPs", end_section=True)
    table.add_row("tokens a step", f"{plan.tokens_per_step:,}")
    table.add_row("steps", f"{plan.steps:,}")
    table.add_row("tokens in all", f"{plan.total_tokens:,}", end_section=True)
    if plan.edges:
        table.add_row("pipeline bubble" + ("" if plan.time else ", from FLOPs alone"), f"{plan.bubble:.1%}")
    if any(plan.data_parallel_bytes):
        table.add_row("sent for data parallelism, a step and rank", f"{max(plan.data_parallel_bytes) / 1e9:,.3f} GB")
    return table


def render_memory(plan: Plan) -> Table:
    """What a rank of each stage holds at the most."""
    title = f"GiB on a rank of {plan.world_size}" + (f", of {plan.cluster.memory_gib:g}" if plan.cluster else "")
    table = Table(title=title, title_justify="left")
    parts = ("weights", "gradients", "optimizer", "activations", "messages", "backward", "peak")
    table.add_column("stage")
    for rank in plan.memory:
        table.add_column(str(rank.stage), justify="right")
    for part in parts:
        table.add_row(part, *(f"{getattr(rank, part) / 2**30:,.3f}" for rank in plan.memory))
    table.add_row("in backward: logits", *(f"{rank.logits / 2**30:,.3f}" for rank in plan.memory))
    table.add_row("in activations: history for later chunks", *(f"{size / 2**30:,.3f}" for size in plan.cached_bytes))
    return table


def render_time(plan: Plan) -> Table:
    """What a step takes on the cluster."""
    assert plan.time and plan.cluster
    time = plan.time
    table = Table(
        title=f"a step on {plan.world_size} {plan.cluster.device}, predicted", show_header=False, title_justify="left"
    )
    table.add_column()
    table.add_column(justify="right")
    parts = {
        "step": time.step,
        "  forward and backward": time.forward_backward,
        "    matmuls of the busiest stage": time.matmul,
        "    its element-wise work": time.memory,
        "    its tensor-parallel exchanges": time.tensor,
        "    of these repeated by recomputation": time.recompute,
        "    longest waits for messages on their way": time.messages,
        "  gradients reduced, exposed": time.gradients,
        "  update": time.update,
        "  weights gathered, exposed": time.gather,
    }
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds:.4g} s")
    table.add_section()
    table.add_row("bubble", f"{time.bubble:.1%}")
    table.add_row("tokens a second", f"{time.tokens_per_second:,.0f}")
    table.add_row("MFU", f"{time.mfu:.1%}")
    table.add_row("GPU-hours, the whole run", f"{time.gpu_hours:,.0f}")
    return table
