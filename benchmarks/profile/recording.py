"""What recording costs: steps of the quickstart with and without it, in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/profile/recording.py [key=value ...]

Prints of the ratios of neighbouring steps the median and the quartiles: of the time that a step takes, and of the
processor time of rank 0, which other programs on the machine disturb less. The quickstart's data has to be prepared
(launch/quickstart.sh).
"""

import argparse
import statistics
import time

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
    run = recorded(load_run("quickstart", ["run_dir=runs/recording-benchmark", *args.words]), WARMUP, 2 * args.pairs, 0)
    ready = preflight(run, world_size, first_of_node=local_rank == 0)
    trainer = Trainer(run, ready, startup.start(run))
    trainer.record(ready.folder)
    session, stream = trainer.session, trainer.stream()
    clocks = {"time": time.perf_counter, "processor time": time.process_time}
    taken: dict[bool, list[list[float]]] = {True: [], False: []}
    for number in range(WARMUP + 2 * args.pairs):
        # which of a pair comes first changes, so that a drift cancels
        recording = (number - WARMUP) % 4 in (0, 3)
        trainer.session = session if recording else None
        dist.barrier()
        began = [clock() for clock in clocks.values()]
        trainer.advance(stream)
        if number >= WARMUP:
            taken[recording].append([clock() - start for clock, start in zip(clocks.values(), began, strict=True)])
    trainer.close()
    if rank == 0:
        pairs = list(zip(taken[True], taken[False], strict=True))
        for number, name in enumerate(clocks):
            low, middle, high = statistics.quantiles([on[number] / off[number] for on, off in pairs], n=4)
            print(f"{name} with recording over without: {middle:.4f} (quartiles {low:.3f} to {high:.3f})")
    startup.stop()


if __name__ == "__main__":
    main()
