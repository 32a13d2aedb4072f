"""FLOPs against the DepthBench paper's figures, and against the operations that the naive models really run."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.parallel import startup
from depthbench.planning import flops
from tests.harness import run_workers
from tests.models import ARCHITECTURES, small_run, start_stage
from tests.reference import Shape, random_weights, reference_logits

PAPER_TOKENS = 4096
PAPER_TERAFLOPS = {
    "400m_L16": "2.981",
    "400m_L20": "3.221",
    "400m_L24": "3.302",
    "400m_L28": "3.439",
    "400m_L32": "3.495",
    "400m_L42": "3.779",
    "400m_L70": "4.328",
}


def run_of(model: str, residual: str = "pre_ln", *words: str) -> RunConfig:
    return load_run("depthbench_400m", [f"model={model}", f"residual={residual}", *words])


def small(residual: str, **settings: int | bool) -> RunConfig:
    shape = {"num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 6, "vocab_size": 11}
    words = (f"model.{key}={value}" for key, value in {**shape, "sequence_length": 7, **settings}.items())
    return run_of("400m_L24", residual, *words)


@pytest.mark.parametrize(("model", "printed"), PAPER_TERAFLOPS.items())
def test_prefill_is_the_papers(model: str, printed: str) -> None:
    assert f"{flops.prefill_paper(run_of(model), PAPER_TOKENS) / 1e12:.3f}" == printed


def test_prefill_is_the_papers_formula_for_mha() -> None:
    L, D, F, V, T = 24, 1024, 2736, 50280, 4096
    base = L * (8 * T * D**2 + 6 * T * D * F + 2 * T**2 * D) + 2 * D * V
    assert flops.prefill_paper(run_of("400m_L24"), T) == base
    assert flops.prefill_paper(run_of("400m_L24", "full_attnres"), T) == base + 4 * T * D * L * (2 * L + 3)
    assert flops.prefill_paper(run_of("400m_L24", "hc"), T) == base + 192 * T * D * L
    sources = sum(2 + k // 6 for k in range(1, 2 * L)) + 9
    assert flops.prefill_paper(run_of("400m_L24", "block_attnres"), T) == base + 4 * T * D * sources
    moda = 4 * (L - 1) * T * D**2 + 4 * T * D * L * (L - 1)
    assert flops.prefill_paper(run_of("400m_L24", "moda"), T) == base + moda


@pytest.mark.parametrize(("residual", "printed"), [("full_attnres", "0.105"), ("hc", "0.035")])
def test_residual_path_of_the_deepest_model(residual: str, printed: str) -> None:
    plain = flops.prefill_paper(run_of("400m_L70"), PAPER_TOKENS)
    assert f"{(flops.prefill_paper(run_of('400m_L70', residual), PAPER_TOKENS) - plain) / 1e12:.3f}" == printed


def test_prefill_of_the_papers_dearest_model() -> None:
    """The upper end of its range: the deepest model with Full AttnRes."""
    assert f"{flops.prefill_paper(run_of('400m_L70', 'full_attnres'), PAPER_TOKENS) / 1e12:.3f}" == "4.433"


def test_block_attnres_as_built_reads_what_there_is() -> None:
    """1 + ceil(k / b) sources at sublayer k: 28 D fewer a token than the paper's formula counts."""
    run, plain, tokens = run_of("400m_L24", "block_attnres"), run_of("400m_L24"), 64
    sources = sum(1 - (-k // 6) for k in range(1, 49))
    as_built = flops.forward_exact(run, tokens) - flops.forward_exact(plain, tokens)
    assert as_built == 4 * tokens * 1024 * sources
    assert flops.prefill_paper(run, tokens) - flops.prefill_paper(plain, tokens) == as_built + 28 * tokens * 1024


def counted_flops(run: RunConfig, tokens: int) -> int:
    """What torch counts in the naive model: matmuls only, over the full attention matrix."""
    model = run.model
    shape = Shape(
        model.num_layers,
        model.hidden_size,
        model.ffn_hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_size,
        vocab_size=model.vocab_size,
        tied=model.tie_embeddings,
    )
    weights = random_weights(shape, run.architecture, torch.Generator().manual_seed(0))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        reference_logits(weights, torch.zeros(1, tokens, dtype=torch.int64), shape, run.architecture)
    total: int = counter.get_total_flops()
    return total


def masked_flops(run: RunConfig, tokens: int) -> int:
    """The share of a full attention matrix that causality masks: T (T - 1) / 2 pairs, two products, every layer."""
    model = run.model
    return model.num_layers * 2 * tokens * (tokens - 1) * model.num_attention_heads * model.head_size


def counted_as_built(rank: int, world_size: int, store: str, runs: list[RunConfig]) -> list[int]:
    """What torch counts in the product's own forward pass of one sequence. Attention through its matmuls, over the full
    square: of the kernel that a CPU would choose it knows no count."""
    found = []
    for number, run in enumerate(runs):
        stage = start_stage(rank, world_size, f"{store}.{number}", run)
        tokens = torch.zeros(1, run.model.sequence_length, dtype=torch.int64)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            stage(tokens, tokens)
        found.append(counter.get_total_flops())
        startup.stop()
    return found


def test_forward_of_every_architecture_is_what_torch_counts_as_built() -> None:
    """Within a hundredth: torch counts no element-wise products, as which some depth reads and mixtures run."""
    shape = {"hidden_size": 512, "ffn_hidden_size": 1280, "num_attention_heads": 8, "num_kv_heads": 4}
    shape |= {"vocab_size": 128}
    runs = [small_run(name, residual, model=shape, train={"precision": "fp32"}) for name, residual, _ in ARCHITECTURES]
    (counted,) = run_workers(1, counted_as_built, runs)
    for run, found in zip(runs, counted, strict=True):
        tokens = run.model.sequence_length
        ours = flops.forward_exact(run, tokens)
        assert found - masked_flops(run, tokens) == pytest.approx(ours, rel=0.01), run.architecture
        assert found - masked_flops(run, tokens) <= ours


SHAPES = [{}, {"num_kv_heads": 2}, {"num_kv_heads": 3, "head_dim": 10}, {"tie_embeddings": True}]


@pytest.mark.parametrize("settings", SHAPES)
def test_forward_of_pre_ln_is_what_torch_counts(settings: dict[str, int]) -> None:
    run, tokens = small("pre_ln", **settings), 7
    assert flops.forward_exact(run, tokens) == counted_flops(run, tokens) - masked_flops(run, tokens)


def test_forward_of_moda_is_what_torch_counts_and_its_depth_attention() -> None:
    """The naive model runs depth attention as element-wise products, and projects each slot's keys and values anew."""
    run, tokens = small("moda", num_kv_heads=2), 7
    model = run.model
    projected_again = 4 * tokens * model.hidden_size * model.kv_heads * model.head_size * model.num_layers
    depth_attention = 4 * tokens * model.hidden_size * model.num_layers * (model.num_layers - 1)
    counted = counted_flops(run, tokens) - masked_flops(run, tokens) - projected_again
    assert flops.forward_exact(run, tokens) == counted + depth_attention


def test_training_is_three_forwards_at_the_models_length() -> None:
    run = small("hc")
    assert flops.train_per_token(run) == 3 * flops.forward_exact(run, 7) / 7


@pytest.mark.parametrize("count", [flops.prefill_paper, flops.forward_exact])
def test_no_tokens_are_refused(count: Callable[[RunConfig, int], float]) -> None:
    with pytest.raises(UserError, match="sequence of 0 tokens: give at least 1"):
        count(small("pre_ln"), 0)
