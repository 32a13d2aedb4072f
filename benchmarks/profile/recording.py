"""What recording costs: steps of the quickstart with and without it, in turn.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/profile/recording.py [key=value ...]

Prints of the ratios of neighbouring steps the median, its 95 % confidence interval and the quartiles: of the time that
a step takes, and of the processor time of rank 0, which other programs on the machine disturb less. Then what the
recorder's part of a step is by itself: how many spans a step has, times what a span takes. (That leaves out what a
message costs beyond its spans.) The quickstart's data has to be prepared (launch/quickstart.sh).
"""

import argparse
import math
import statistics
import time

import torch.distributed as dist

from depthbench.config.load import load_run
from depthbench.parallel import startup
from depthbench.profiling.events import Kind
from depthbench.profiling.recorder import Recorder
from depthbench.training.preflight import preflight
from depthbench.training.profiled import recorded
from depthbench.training.trainer import Trainer

WARMUP = 3


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, at 95 %: order statistics, which take nothing for granted of the ratios' distribution."""
    count = len(ratios)
    below = [math.comb(count, k) / 2**count for k in range(count)]
    outside = next(k for k in range(count) if sum(below[: k + 1]) > 0.025)
    ordered = sorted(ratios)
    return ordered[max(0, outside - 1)], ordered[min(count - 1, count - outside)]


def span_seconds(recorder: Recorder) -> float:
    """Processor time of one span, the least of some rounds."""
    rounds = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(1000):
            with recorder.span(Kind.DATA):
                pass
        rounds.append((time.process_time() - began) / 1000)
    return min(rounds)


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
    assert session
    recorder = session.recorder
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
    spans = len(recorder.taken) / len({span.step for span in recorder.taken})
    if rank == 0:
        pairs = list(zip(taken[True], taken[False], strict=True))
        for number, name in enumerate(clocks):
            ratios = [on[number] / off[number] for on, off in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            least, most = interval(ratios)
            print(
                f"{name} with recording over without: {middle:.4f} (95 %: {least:.3f} to {most:.3f}; "
                f"quartiles {low:.3f} to {high:.3f})"
            )
        step = statistics.median(off[0] for off in taken[False])
        each = span_seconds(recorder)
        print(f"{spans:.0f} spans a step, {each * 1e6:.1f} us each: {spans * each / step:.4%} of a step")
    startup.stop()


if __name__ == "__main__":
    main()
