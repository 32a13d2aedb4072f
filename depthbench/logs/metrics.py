"""Numbers of each step to files: JSONL, TensorBoard, optionally Weights & Biases.

A resumed run writes a step again that it had lost; so each file is first cut back to the step of the checkpoint, and
every step stands in it once, in order.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from depthbench.config.schema import LogConfig
from depthbench.errors import UserError


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """`metrics.jsonl`: {"step": 12, "loss": ...}, one line a step, with its validation loss where there is one."""

    def __init__(self, path: Path, resumed_at: int) -> None:
        if path.is_file():
            _keep_until(path, resumed_at)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def flush(self) -> None:
        """Each line is in the file at once; now it is on the disk too, as the checkpoint will be."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop lines past `step`, and what is no line of a step: a crash or a lost node may leave anything."""
    shorter = path.with_suffix(".tmp")
    with open(path, "rb") as old, open(shorter, "wb") as new:
        for line in old:
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                continue
            new.write(line if line.endswith(b"\n") else line + b"\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(shorter, path)


def _age_events(folder: Path) -> None:
    """Readers take event files in the order of the second in their names, then of host and process id as text. A start
    within the same second, or on a node whose clock is behind, must still come last; so older files move back."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    stamps = [int(file.name.split(".")[3]) for file in files]
    late = max(stamps, default=0) - int(time.time()) + 1
    for file, stamp in zip(files, stamps, strict=True) if late > 0 else ():
        file.rename(folder / file.name.replace(f".{stamp:010d}.", f".{stamp - late:010d}.", 1))


class TensorBoard:
    """Event files in `tensorboard/`; events past `resumed_at` are marked as purged."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        _age_events(folder)
        self.writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name if "/" in name else f"train/{name}", value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One W&B run a run folder: its id is kept there, so that a resumed run continues it."""

    def __init__(self, project: str, name: str, folder: Path, settings: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(f"log.wandb_project={project} needs `pip install wandb`") from error
        known = folder / "wandb-id"
        identity = known.read_text() if known.is_file() else wandb.util.generate_id()
        known.write_text(identity)
        self.run = wandb.init(project=project, name=name, id=identity, resume="allow", dir=folder, config=settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def flush(self) -> None:
        pass  # a process of its own sends it

    def close(self) -> None:
        self.run.finish()


class MetricsLog:
    """All sinks that the run asks for. Made on one rank only."""

    def __init__(self, config: LogConfig, name: str, folder: Path, resumed_at: int, settings: dict[str, Any]) -> None:
        self.sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", resumed_at)]
        if config.tensorboard:
            self.sinks.append(TensorBoard(folder / "tensorboard", resumed_at))
        if config.wandb_project:
            self.sinks.append(WeightsAndBiases(config.wandb_project, name, folder, settings))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self.sinks:
            sink.write(step, values)

    def flush(self) -> None:
        """Before a checkpoint: what a resume from it will not write again has to be in the files."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
