"""A Pre-LN model made into another architecture computes what it did, where that is possible, and says where it is not.

By the naive float64 references, which know nothing of upcycling: the source's weights in Pre-LN's, the upcycled ones in
the other architecture's.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.convert.huggingface import plain_llama
from depthbench.convert.importing import import_model
from depthbench.convert.reading import Weights
from depthbench.convert.upcycle import Upcycled, upcycled
from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual, architecture
from tests.models import reference_name
from tests.reference import Shape, random_weights, reference_logits

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=4,
    vocab_size=150,
    sequence_length=16,
    num_kv_heads=2,
)
SHAPE = Shape(
    num_layers=4, hidden_size=48, ffn_hidden_size=80, num_heads=4, num_kv_heads=2, head_dim=12, vocab_size=150
)
TOKENS = torch.randint(150, (2, 16), generator=torch.Generator().manual_seed(0))


class InMemory:
    """A `Source` of random float64 Pre-LN weights."""

    tokenizer: Path | None = None

    def __init__(self, norm_eps: float) -> None:
        self.model, self.architecture, self.residual = (
            MODEL,
            plain_llama().name,
            plain_llama().Config(norm_eps=norm_eps),
        )
        self.weights = random_weights(SHAPE, "pre_ln", torch.Generator().manual_seed(1))
        # as small as embeddings are at the start: there an eps counts
        self.weights = {n: t.detach() * (0.02 if n == "embedding.weight" else 1) for n, t in self.weights.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: tensor.dtype for name, tensor in self.weights.items()}
        self.origin: dict[str, Any] = {"format": "random"}

    def read(self, name: str) -> Tensor:
        return self.weights[name]


def options(name: str, config: Any) -> dict[str, Any]:
    """The reference's, from our settings."""
    settings = asdict(config)
    if name == "block_attnres":
        settings["sublayers_per_block"] = settings["sublayers_per_block"] or -(-8 // settings["num_blocks"])
        settings["first_norm_eps"] = settings.pop("norm_eps")
        settings["norm_eps"] = settings.pop("read_norm_eps")
        settings["norm_eps_of_sum"] = settings.pop("read_norm_eps_of_sum")
    else:
        settings["eps"] = settings.pop("norm_eps")
        settings["readout_eps"] = settings.pop("readout_norm_eps", None)
    unknown = {"num_blocks", "init"} | (set() if "num_streams" in settings else {"readout_eps"})
    return {key: value for key, value in settings.items() if key not in unknown}


def reference_of(source: Any) -> Tensor:
    weights = {reference_name(name): source.read(name).to(torch.float64) for name in source.dtypes}
    found = options(source.architecture, source.residual)
    return reference_logits(weights, TOKENS, SHAPE, source.architecture, **found)


def difference(source: InMemory, made: Upcycled) -> float:
    theirs, ours = reference_of(source), reference_of(made)
    return float((ours - theirs).abs().max() / theirs.abs().max())


EQUAL: list[tuple[str, list[str]]] = [
    ("pre_ln", []),
    ("lns", []),
    ("full_attnres", []),
    ("block_attnres", []),
    ("block_attnres", ["num_blocks=null", "sublayers_per_block=3", "temperature=2.0"]),
    ("block_attnres", ["num_blocks=2", "key_norm=false"]),
    ("hc", []),
    ("hc", ["num_streams=3", "readout=norm_then_sum"]),
    ("mhc", []),
    ("mhc", ["num_streams=1"]),
    ("mhc", ["num_streams=3", "readout=sum_then_norm", "sinkhorn_order=columns_first", "sinkhorn_iterations=1"]),
]


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize(
    ("residual", "words"), EQUAL, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_the_function_is_kept(residual: str, words: list[str], eps: float) -> None:
    source = InMemory(eps)
    made = upcycled(source, residual, words, allow_different=False)
    assert made.different == "" and made.origin["function"] == "the same"
    assert difference(source, made) <= 1e-9


DIFFERENT = ["sandwich_ln", "keel", "deepnorm", "moda"]


@pytest.mark.parametrize("residual", DIFFERENT)
def test_where_it_cannot_be_kept(residual: str) -> None:
    source = InMemory(1e-5)
    with pytest.raises(UserError, match=r"would compute another function: .* --allow-different imports it"):
        upcycled(source, residual, [], allow_different=False)
    made = upcycled(source, residual, [], allow_different=True)
    assert made.different and made.different in made.origin["function"]
    assert difference(source, made) > 1e-3


@pytest.mark.parametrize(
    ("residual", "words", "message"),
    [
        ("block_attnres", ["read_norm_eps_of_sum=false"], r"read_norm_eps_of_sum=False, where True would keep it"),
        ("hc", ["readout_norm_eps=1e-5"], r"readout_norm_eps=1e-05, where 0\.00016 would keep it"),
        ("mhc", ["init=near_uniform"], r"random phi; init=gap8 would keep"),
    ],
)
def test_settings_that_undo_it(residual: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        upcycled(InMemory(1e-5), residual, words, allow_different=False)


def test_the_source_eps_matters() -> None:
    """The architectures' own eps would make another model of it: the embedding is small."""
    made = upcycled(InMemory(1e-5), "full_attnres", ["read_norm_eps_of_sum=false"], allow_different=True)
    assert difference(InMemory(1e-5), made) > 1e-4


@pytest.mark.parametrize("residual", ["full_attnres", "block_attnres"])
def test_queries_are_zero_and_gains_one(residual: str) -> None:
    made = upcycled(InMemory(1e-5), residual, [], allow_different=False)
    reads = {kind: [n for n in made.dtypes if n.endswith(f".{kind}")] for kind in ("query", "key_norm")}
    assert len(reads["query"]) == len(reads["key_norm"]) == 2 * MODEL.num_layers
    assert all(not made.read(name).any() for name in reads["query"])
    assert all((made.read(name) == 1).all() for name in reads["key_norm"])


@pytest.mark.parametrize(
    ("residual", "words", "message"),
    [
        (None, ["num_blocks=2"], "--set num_blocks=2 changes settings of the architecture that --residual names"),
        ("attnres", [], "no 'attnres' in configs/residual; nearest is"),
        ("hc", ["streams=2"], "unknown key residual.streams; nearest is num_streams"),
        ("hc", ["num_streams=0"], r"residual\.num_streams=0 must be at least 1"),
        ("block_attnres", ["num_blocks=40"], r"num_blocks=40 must lie in 1\.\.8"),
        ("hc", ["model=other"], "--set model=.* give fields of the architecture's settings"),
    ],
)
def test_wrong_requests(residual: str | None, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        upcycled(InMemory(1e-5), residual, words, allow_different=True)


def test_only_pre_ln_can_be_upcycled() -> None:
    made = upcycled(InMemory(1e-5), "hc", [], allow_different=False)
    with pytest.raises(UserError, match="the source's architecture is hc: only Pre-LN models"):
        upcycled(made, "mhc", [], allow_different=True)


def test_an_architecture_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture("hc"), "from_pre_ln", Residual.from_pre_ln)
    with pytest.raises(UserError, match="hc does not say what becomes of a Pre-LN model"):
        upcycled(InMemory(1e-5), "hc", [], allow_different=True)


def test_what_is_written_is_what_was_made(tmp_path: Path) -> None:
    """In bfloat16 too, where queries and gains stay in float32; projections that the source lacks are drawn."""
    for residual, dtype in (("block_attnres", torch.bfloat16), ("moda", torch.float64)):
        made = upcycled(InMemory(1e-5), residual, [], allow_different=True)
        lines: list[str] = []
        done = import_model(made, tmp_path / residual, dtype=dtype, warn=lines.append)
        assert lines == ["the source has no tokenizer.json and no tokenizer.model: the import has no tokenizer"]
        weights = Weights(done.folder)
        assert weights.manifest["origin"]["upcycled_from"] == "pre_ln"
        assert architecture(weights.run.architecture).Config is type(weights.run.residual) is type(made.residual)
        assert weights.run.residual == made.residual
        for name, values in ((name, made.read(name)) for name in made.dtypes):
            kept = torch.float32 if name.endswith(("query", "key_norm")) else dtype
            assert weights.dtypes[name] is kept
            assert torch.equal(weights.read(name, tuple(values.shape), kept), values.to(kept)), name
        drawn = [made.read(name) for name in made.dtypes if ".mlp.depth_" in name]
        assert all(0.015 < float(values.std()) < 0.025 for values in drawn)


def test_which_norms_bfloat16_holds_only_nearly() -> None:
    """Where none is scaled, weights that were bfloat16 are carried over as they were, and nothing may differ."""
    source = InMemory(1e-5)
    source.weights = {name: values.to(torch.bfloat16).to(values) for name, values in source.weights.items()}
    for residual, nearly in (("block_attnres", False), ("hc", False), ("mhc", False), ("lns", True)):
        made = upcycled(source, residual, [], allow_different=False)
        assert made.rounds(dict.fromkeys(made.dtypes, torch.bfloat16)) is nearly, residual
        assert not made.rounds(made.dtypes), residual
