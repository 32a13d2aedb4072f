"""Recordings with known times: one written down span by span, and pipelines played through event by event."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthbench.profiling.events import Kind, RankRecord, Recording, Span


def rank_record(rank: int, stages: int, spans: list[Span], **changed: Any) -> RankRecord:
    """Of tensor=1 and as many replicas as it takes; data-parallel replicas differ in the lowest number."""
    world = changed.pop("world_size", stages)
    data = world // stages
    values: dict[str, Any] = {
        "rank": rank,
        "world_size": world,
        "data": rank % data,
        "pipeline": rank // data,
        "tensor": 0,
        "host": f"node{rank}",
        "device": "cpu",
        "clock_error": 0.5,
        "memory_bytes": 1000 * (rank + 1),
        "cache_bytes": 10 * rank,
        "cache_hit_bytes": 60 * rank,
        "tokens": [64],
        "spans": spans,
    }
    return RankRecord(**{**values, **changed})


def by_hand(folder: Path) -> Recording:
    """Two stages of a chunk each, two microbatches, one step; every message has 4000 bytes. The pass is 5 to 85."""
    first = [
        Span(Kind.STEP, 0, 100, 1),
        Span(Kind.DATA, 0, 5, 1),
        Span(Kind.FORWARD, 5, 15, 1, 0, 0),
        Span(Kind.FORWARD, 15, 25, 1, 0, 1),
        Span(Kind.WAIT_RECEIVE, 25, 51, 1, 1, 0, True),
        Span(Kind.BACKWARD, 51, 60, 1, 0, 0),
        Span(Kind.WAIT_RECEIVE, 60, 75, 1, 1, 1, True),
        Span(Kind.BACKWARD, 75, 85, 1, 0, 1),
        Span(Kind.REDUCE, 85, 90, 1),
        Span(Kind.OPTIMIZER, 90, 98, 1),
        Span(Kind.SEND, 15, 20, 1, 1, 0, False, 4000, 2),
        Span(Kind.SEND, 25, 31, 1, 1, 1, False, 4000, 2),
        Span(Kind.RECEIVE, 26, 51, 1, 1, 0, True, 4000, 2),
        Span(Kind.RECEIVE, 60, 75, 1, 1, 1, True, 4000, 2),
    ]
    second = [
        Span(Kind.STEP, 0, 96, 1),
        Span(Kind.WAIT_RECEIVE, 3, 20, 1, 1, 0),
        Span(Kind.FORWARD, 20, 30, 1, 1, 0),
        Span(Kind.BACKWARD, 30, 48, 1, 1, 0),
        Span(Kind.FORWARD, 48, 56, 1, 1, 1),
        Span(Kind.BACKWARD, 56, 70, 1, 1, 1),
        Span(Kind.WAIT_SEND, 70, 74, 1, 1, 1, True),
        Span(Kind.REDUCE, 80, 90, 1),
        Span(Kind.OPTIMIZER, 90, 96, 1),
        Span(Kind.RECEIVE, 2, 20, 1, 1, 0, False, 4000, 2),
        Span(Kind.RECEIVE, 21, 47, 1, 1, 1, False, 4000, 2),
        Span(Kind.SEND, 48, 52, 1, 1, 0, True, 4000, 2),
        Span(Kind.SEND, 70, 74, 1, 1, 1, True, 4000, 2),
    ]
    return Recording(folder, [rank_record(0, 2, first), rank_record(1, 2, second)], [], None)


@dataclass
class Pipeline:
    """An interleaved 1F1B pipeline, one step after the other. Times in microseconds.

    A message takes `wire` from when it was sent and lasts as a SEND as long; a stage posts a receive as it begins what
    it computes before. Stage 1 computes `slow` times as long as the others.
    """

    stages: int = 4
    virtual: int = 2
    microbatches: int = 8
    replicas: int = 1
    steps: int = 3
    forward: float = 900.0
    backward: float = 1900.0
    wire: float = 150.0
    slow: float = 1.15
    spans: dict[int, list[Span]] = field(default_factory=dict)

    def tasks(self, stage: int) -> list[tuple[int, int, bool]]:
        """(chunk, microbatch, backward) in the order of the stage."""
        table = [
            (virtual, microbatch)
            for first in range(0, self.microbatches, self.stages)
            for virtual in range(self.virtual)
            for microbatch in range(first, first + self.stages)
        ]
        forward = [(v * self.stages + stage, m, False) for v, m in table]
        backward = [((self.virtual - 1 - v) * self.stages + stage, m, True) for v, m in table]
        ahead = self.stages - stage - 1
        if self.virtual > 1:
            ahead = min(2 * ahead + (self.virtual - 1) * self.stages, len(forward))
        done = forward[:ahead]
        for index, task in enumerate(backward):
            done += [*forward[ahead + index : ahead + index + 1], task]
        return done

    def size(self, chunk: int) -> int:
        return 1_000_000 * min(chunk, self.stages) + 48

    def play(self, step: int, replica: int, start: float) -> float:
        """Returns when its last stage is through."""
        last = self.stages * self.virtual - 1
        clock = [start + 200.0] * self.stages
        waiting = {stage: self.tasks(stage) for stage in range(self.stages)}
        posted = list(clock)
        sent: dict[tuple[int, int, bool], float] = {}
        made: dict[int, list[Span]] = {stage: [] for stage in range(self.stages)}
        while any(waiting.values()):
            for stage, tasks in waiting.items():
                while tasks:
                    chunk, microbatch, backward = tasks[0]
                    edge = (chunk + 1 if backward else chunk, microbatch, backward)
                    needs = chunk < last if backward else chunk > 0
                    if needs and edge not in sent:
                        break
                    if needs:
                        begin, through = clock[stage], max(posted[stage], sent[edge]) + self.wire
                        clock[stage] = max(begin, through)
                        size = self.size(edge[0])
                        made[stage].append(Span(Kind.RECEIVE, posted[stage], through, step, *edge, size, 2))
                        if through > begin:
                            made[stage].append(Span(Kind.WAIT_RECEIVE, begin, through, step, *edge))
                    posted[stage] = clock[stage]
                    tasks.pop(0)
                    cost = (self.backward if backward else self.forward) * (self.slow if stage == 1 else 1)
                    cost *= 1 + 0.02 * ((step + microbatch) % 3)
                    kind = Kind.BACKWARD if backward else Kind.FORWARD
                    made[stage].append(Span(kind, clock[stage], clock[stage] + cost, step, chunk, microbatch, backward))
                    clock[stage] += cost
                    if chunk > 0 if backward else chunk < last:
                        key = (chunk if backward else chunk + 1, microbatch, backward)
                        sent[key] = clock[stage]
                        through, size = clock[stage] + self.wire, self.size(key[0])
                        made[stage].append(Span(Kind.SEND, clock[stage], through, step, *key, size, 2))
                        clock[stage] += 20
        end = max(clock) + 1500
        for stage, spans in made.items():
            spans.append(Span(Kind.DATA, start, start + 200, step))
            spans.append(Span(Kind.REDUCE, clock[stage], end - 900, step))
            spans.append(Span(Kind.OPTIMIZER, end - 850, end, step))
            spans.append(Span(Kind.STEP, start, end, step))
            self.spans.setdefault(stage * self.replicas + replica, []).extend(spans)
        return end

    def recording(self, folder: Path, missing: tuple[int, ...] = (), planned: bool = True) -> Recording:
        for replica in range(self.replicas):
            start = 0.0
            for step in range(1, self.steps + 1):
                start = self.play(step, replica, start) + 100
        world = self.stages * self.replicas
        records = [
            rank_record(
                rank,
                self.stages,
                spans,
                world_size=world,
                memory_bytes=3_000_000_000 + 200_000_000 * rank,
                cache_bytes=1_000_000 * rank,
                cache_hit_bytes=40_000_000,
                tokens=[65536] * self.steps,
            )
            for rank, spans in sorted(self.spans.items())
            if rank not in missing
        ]
        return Recording(folder, records, list(missing), self.plan() if planned else None)

    def plan(self) -> dict[str, Any]:
        edges = []
        for backward in (False, True):
            for chunk in range(1, self.stages * self.virtual):
                ends = (chunk, chunk - 1) if backward else (chunk - 1, chunk)
                edges.append(
                    {
                        "from": ends[0],
                        "to": ends[1],
                        "sender_stage": ends[0] % self.stages,
                        "receiver_stage": ends[1] % self.stages,
                        "direction": "backward" if backward else "forward",
                        "live_tensors": 1,
                        "history_tensors": 1,
                        "bytes": self.size(chunk),
                        "bytes_without_cache": 1_000_000 * chunk + 48,
                        "bytes_paper": 1_000_000 * min(chunk, self.stages + 1) + 48,
                    }
                )
        settings = {"parallel": {"pipeline": self.stages, "virtual_pipeline": self.virtual}, "train": {"seed": 1}}
        return {
            "run": {"name": "synthetic", "architecture": "block_attnres", **settings},
            "architecture": "block_attnres",
            "parameters": {"total": 400_000_000},
            "tokens": {"per_step": 65536},
            "bubble": 0.2,
            "step_seconds": 0.05,
            "edges": edges,
        }
