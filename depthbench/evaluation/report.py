"""Results as tables for the console."""

from typing import Any

from rich.table import Table


def domain_table(found: dict[str, Any]) -> Table:
    """found: `DomainNLL.as_dict`."""
    caption = "a category: the mean of its tasks" if found["categories"] else None
    table = Table(title="domain NLL", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("task")
    for heading in ("samples", "tokens", "NLL/token", "bits/byte", "context cut", "target cut"):
        table.add_column(heading, justify="right")

    def measures(row: dict[str, Any]) -> tuple[str, str]:
        return f"{row['nll_per_token']:.4f}", f"{row['bits_per_byte']:.4f}"

    for name, row in [*found["tasks"].items(), ("all tokens", found["all"])]:
        if row is found["all"]:
            table.add_section()
        counts = (f"{row['samples']:,}", f"{row['tokens']:,}")
        cuts = (f"{row['samples_with_context_cut']:,}", f"{row['samples_with_target_cut']:,}")
        table.add_row(name, *counts, *measures(row), *cuts)
    if found["categories"]:
        table.add_section()
    for name, row in found["categories"].items():
        table.add_row(name, "", "", *measures(row))
    return table


def harness_table(found: dict[str, Any]) -> Table:
    """found: `HarnessResults.as_dict`."""
    cut = found["requests_with_context_cut"]
    caption = f"{cut:,} requests had their context cut to the model's length" if cut else None
    table = Table(
        title=f"lm-evaluation-harness {found['lm_eval']}", caption=caption, title_justify="left", caption_justify="left"
    )
    table.add_column("task")
    table.add_column("rows", justify="right")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("standard error", justify="right")
    for name, measured in found["tasks"].items():
        first = True
        for key, value in measured.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = measured.get(f"{metric}_stderr,{filtered}")
            shown = f"{error:.4f}" if isinstance(error, int | float) else "-"
            label = metric if filtered == "none" else f"{metric}, {filtered}"
            row = f"{found['rows'][name]:,}" if name in found["rows"] else ""
            table.add_row(name if first else "", row if first else "", label, f"{value:.4f}", shown)
            first = False
    return table


def model_lines(model: dict[str, Any]) -> list[str]:
    """model: `Provenance.as_dict`."""
    step = f", step {model['step']}" if model["step"] else ""
    return [
        f"{model['folder']}",
        f"{model['architecture']}{step}, {model['parameters']:,} parameters, {model['dtype']}, "
        f"config.json {model['config_sha256'][:12]}",
    ]
