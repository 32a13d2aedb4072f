"""The layout search: what it finds, what it refuses and why, and that what it prints can be run."""

import io
import json
import subprocess
import sys
import time

import pytest
from rich.console import Console

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run, data_parallel
from depthbench.errors import UserError
from depthbench.planning import search as searching
from depthbench.planning.cluster import load_cluster
from depthbench.planning.search import Search, search
from depthbench.planning.time import predict

H100 = load_cluster("h100")


def run_of(*words: str) -> RunConfig:
    return load_run("depthbench_1600m", ["model=1600m_L40", "residual=block_attnres", *words])


def nothing(run: RunConfig, world_size: int) -> int:
    return 0


def by_weights(run: RunConfig, world_size: int) -> int:
    """Room only for an eighth of the model a rank."""
    return 0 if run.parallel.tensor * run.parallel.pipeline >= 8 else H100.memory + 1


def shown(result: Search) -> str:
    text = io.StringIO()
    Console(width=160, file=text).print(result.render())
    return text.getvalue()


def test_the_fastest_come_first_and_their_words_make_the_run() -> None:
    """Each choice passes the run's own checks, and its overrides give the run that was predicted."""
    found = search(run_of(), H100, by_weights, gpus=[16, 64], simulated=6, shown=3)
    assert list(found.choices) == [16, 64]
    for gpus, choices in found.choices.items():
        assert [c.time.step for c in choices] == sorted(c.time.step for c in choices) and len(choices) == 3
        for choice in choices:
            assert choice.run.parallel.tensor * choice.run.parallel.pipeline >= 8
            again = run_of(*choice.overrides)
            check_run(again, gpus)
            assert again == choice.run
            assert predict(again, H100, gpus) == choice.time
            assert choice.replicas == data_parallel(again, gpus)


def test_the_simulation_decides_among_the_best_estimates() -> None:
    """More simulated, and the best is no slower."""
    few, many = (search(run_of(), H100, by_weights, gpus=[64], simulated=n, shown=1) for n in (1, 10))
    assert many.choices[64][0].time.step <= few.choices[64][0].time.step


def test_what_is_refused_is_counted_by_reason() -> None:
    found = search(run_of(), H100, by_weights, gpus=[1024], simulated=4)
    refused = found.refused[1024]
    assert refused[searching.INDIVISIBLE_BATCH] > 0 and refused[searching.TOO_FEW_MICROBATCHES] > 0
    assert refused[searching.TOO_LARGE] > 0
    small = search(run_of(), H100, nothing, gpus=[2], simulated=1).refused[2]
    assert small[searching.INDIVISIBLE_GPUS] > 0
    odd = search(run_of("model.num_kv_heads=2"), H100, nothing, gpus=[8], simulated=1).refused[8]
    assert odd[searching.INDIVISIBLE_MODEL] > 0
    assert set(odd) <= {getattr(searching, name) for name in dir(searching) if name.isupper()}, "a reason of its own"


def test_where_nothing_fits_the_table_says_so() -> None:
    found = search(run_of(), H100, lambda run, world_size: H100.memory + 1, gpus=[8])
    assert found.choices == {8: []}
    assert "8 GPUs: no layout." in shown(found) and searching.TOO_LARGE in " ".join(shown(found).split())


def test_layers_that_do_not_divide_get_chunks_as_even_as_can_be() -> None:
    """28 layers over 8 stages."""

    def eight_stages(run: RunConfig, world_size: int) -> int:
        return 0 if run.parallel.pipeline == 8 and run.parallel.virtual_pipeline == 1 else H100.memory + 1

    (choice,) = search(run_of("model=1600m_L28"), H100, eight_stages, gpus=[8], shown=1).choices[8]
    assert choice.run.pipeline.blocks_per_chunk is not None and sum(choice.run.pipeline.blocks_per_chunk) == 28
    assert "pipeline.blocks_per_chunk=[3,4,4,4,4,3,3,3]" in choice.overrides


def test_numbers_of_gpus() -> None:
    """Whole nodes unless asked for."""
    assert list(search(run_of(), H100, nothing, simulated=1).choices) == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert list(search(run_of(), H100, nothing, gpus=[4], simulated=1).choices) == [4]
    with pytest.raises(UserError, match="0 GPUs: give at least 1"):
        search(run_of(), H100, nothing, gpus=[0])


def test_a_run_that_could_not_start_anywhere_is_refused() -> None:
    with pytest.raises(UserError, match="lr=-1"):
        search(run_of("optimizer.lr=-1"), H100, nothing, gpus=[8])


def test_its_outputs() -> None:
    found = search(run_of(), H100, nothing, gpus=[8], simulated=2, shown=1)
    plain = json.loads(json.dumps(found.as_dict()))
    (choice,) = plain["choices"]
    assert choice["gpus"] == 8 and choice["time"]["step"] > 0 and "parallel.tensor=1" in choice["overrides"]
    assert plain["refused"][0]["reasons"][searching.INDIVISIBLE_GPUS] > 0
    assert "H100-SXM5-80GB" in shown(found) and f"{choice['time']['step']:.3f}" in shown(found)


def test_all_numbers_of_gpus_take_seconds() -> None:
    """The bound leaves room for a busy machine."""
    before = time.process_time()
    search(run_of(), H100, by_weights)
    assert time.process_time() - before < 20


def test_megatron_is_not_imported() -> None:
    code = """
import sys
import depthbench.planning.search
loaded = [name for name in sys.modules if name.startswith("megatron")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
