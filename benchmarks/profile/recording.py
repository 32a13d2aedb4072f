"""What recording costs: steps of the quickstart with and without it, in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/profile/recording.py [key=value ...]

Prints the median over pairs of neighbouring steps of the ratio of their times, and its quartiles. The quickstart's data
has to be prepared (launch/quickstart.sh).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from depthbench.config.load import load_run
from depthbench.parallel import startup
from depthbench.training.preflight import preflight
from depthbench.training.profiled import recorded
from depthbench.training.trainer import Trainer

WARMUP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    rank, world_size, local_rank = startup.world_from_environment()
    with tempfile.TemporaryDirectory() as folder:
        run = replace(load_run("quickstart", args.words), run_dir=folder)
        run = recorded(run, WARMUP, 2 * args.pairs, 0)
        ready = preflight(run, world_size, first_of_node=local_rank == 0)
        trainer = Trainer(run, ready, startup.start(run))
        trainer.record(Path(folder) / "recording")
        session, stream = trainer.session, trainer.stream()
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(WARMUP + 2 * args.pairs):
            # which of a pair comes first changes, so that a drift cancels
            recording = (number - WARMUP) % 4 in (0, 3)
            trainer.session = session if recording else None
            dist.barrier()
            began = time.perf_counter()
            trainer.advance(stream)
            if number >= WARMUP:
                seconds[recording].append(time.perf_counter() - began)
        trainer.close()
    if rank == 0:
        ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"a step with recording over one without: {middle:.4f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)})"
        )
    startup.stop()


if __name__ == "__main__":
    main()
