"""What a checkpoint of DepthBench's code does not say: which order of HC's readout trained it. The naive reference is
trained under each, and the loss on text of that kind tells which it was."""

import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor

from depthbench.convert.olmo import OlmoSource
from depthbench.convert.olmo_unsaid import Trial, best, decided, text_tokens
from depthbench.convert.reading import Weights
from depthbench.data.tokenizers import load_tokenizer
from depthbench.errors import UserError
from tests.corpora import VOCAB, Corpus
from tests.harness import run_workers
from tests.reference import Shape, random_weights, reference_loss

from .olmo_checkpoints import PUBLISHED, SHAPE, Convert, convert, drawn, their_config, their_tensors, write

TINY = Shape(2, 16, 24, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=VOCAB)
ORDERS = ("sum_then_norm", "norm_then_sum")
STEPS, ROWS, LENGTH = 40, 16, 24


def text_of(names: Sequence[str]) -> str:
    return "\n".join(topics[name] for name in names)


def trained(order: str, ids: Tensor) -> dict[str, Tensor]:
    """The reference's weights after some steps that predict `ids`, from weights as they start."""
    generator = torch.Generator().manual_seed(5)
    weights = random_weights(TINY, "hc", generator)
    for name, weight in weights.items():
        weight.data = weight.data.float()
        if name.endswith((".weight",)) and "norm" not in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.05
        if name.endswith("static_alpha"):
            weight.data = torch.cat([torch.eye(4)[:, :1], torch.eye(4)], 1)
    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH - 1, (ROWS,), generator=generator)
        windows = torch.stack([ids[start : start + LENGTH + 1] for start in starts.tolist()])
        mask = torch.ones(ROWS, LENGTH)
        total, count = reference_loss(
            weights, windows[:, :-1], TINY, "hc", labels=windows[:, 1:], mask=mask, readout=order
        )
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _import(rank: int, world_size: int, store: str, path: Path, text: Path, out: Path) -> list[Convert]:
    return [
        convert("import", path, out / "refused"),
        convert("import", path, out / "found", "--text", text),
        convert("import", path, out / "told", "--no-verify", "--set", f"readout={ORDERS[1]}"),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_the_loss_tells_the_order(order: str, corpus: Corpus, tmp_path: Path) -> None:
    names = sorted(topics)
    (ids,) = load_tokenizer(corpus.tokenizer).encode_batch([text_of(names[:20])])
    tensors = their_tensors(trained(order, torch.tensor(ids)), "hc")
    config = their_config(PUBLISHED["hc"], TINY, "float32")
    path = write(tmp_path / "step40", config, tensors)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "any.model").write_bytes(Path(corpus.tokenizer).read_bytes())
    text = tmp_path / "other.txt"
    text.write_text(text_of(names[40:44]))
    ((refused, found, told),) = run_workers(1, _import, path, text, tmp_path)
    assert refused.code == 2 and not (tmp_path / "refused").exists()
    assert "readout is one of sum_then_norm, norm_then_sum. Give a text" in refused.err
    assert "--text FILE" in refused.err and "--set readout=sum_then_norm" in refused.err
    assert found.code == 0, found.err
    weights = Weights(tmp_path / "found")
    assert weights.run.residual.readout == order
    lines = [line for line in found.out.splitlines() if line.endswith(" nats a token")]
    losses = {line.partition(":")[0].removeprefix("readout="): float(line.split()[1]) for line in lines}
    assert set(losses) == set(ORDERS) and min(losses, key=lambda name: losses[name]) == order
    assert losses[order] < math.log(VOCAB) - 0.2 and max(losses.values()) - losses[order] > 0.05
    assert weights.manifest["origin"]["found_by_loss"] == lines
    assert told.code == 0 and Weights(tmp_path / "told").run.residual.readout == ORDERS[1]


def test_a_lead_that_may_be_chance() -> None:
    draw = torch.randn(2, 200, generator=torch.Generator().manual_seed(0)).double()
    first, second = (Trial({"readout": name}, 3 + noise) for name, noise in zip(ORDERS, draw, strict=True))
    with pytest.raises(UserError, match="the losses on 200 tokens do not tell how to read the checkpoint: readout="):
        best([first, second], guessing=6.0)
    close = Trial({"readout": ORDERS[1]}, first.losses + 0.01)  # surely worse, but by nothing
    with pytest.raises(UserError, match=r"a lead of 0\.020 is needed"):
        best([first, close], guessing=6.0)
    far = Trial({"readout": ORDERS[1]}, first.losses + 0.1)
    assert best([far, first], guessing=6.0) is first
    with pytest.raises(UserError, match=r"predicts the text better than guessing \(2.0000 nats a token\)"):
        best([far, first], guessing=2.0)
    broken = Trial({"readout": ORDERS[1]}, torch.full((200,), math.nan).double())
    with pytest.raises(UserError, match="nan nats"):
        best([broken, broken], guessing=6.0)


def test_what_can_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, their_config(PUBLISHED["hc"]), their_tensors(drawn(PUBLISHED["hc"]), "hc"))
    assert OlmoSource(path).unsaid == {"readout": ORDERS}
    given = OlmoSource(path, {"readout": ORDERS[1]})
    assert not given.unsaid and given.residual.readout == ORDERS[1]
    with pytest.raises(UserError, match=r"residual\.readout=mean must be one of sum_then_norm, norm_then_sum"):
        OlmoSource(path, {"readout": "mean"})
    with pytest.raises(UserError, match=r"residual.num_streams is said by the checkpoint's config.json; what can be g"):
        OlmoSource(path, {"num_streams": 2})


def test_words_that_say_too_much(tmp_path: Path) -> None:
    path = write(tmp_path, their_config(PUBLISHED["hc"]), their_tensors(drawn(PUBLISHED["hc"]), "hc"))
    source, text = OlmoSource(path), tmp_path / "text"
    with pytest.raises(UserError, match=r"--set readout=sum_then_norm says already what it would tell"):
        decided(source, ["readout=sum_then_norm"], text)
    with pytest.raises(UserError, match=r"--set model=\.\.\.: give fields that the checkpoint leaves open, as readout"):
        decided(source, ["model=other"], text)
    assert decided(source, ["readout=norm_then_sum"], None).residual.readout == "norm_then_sum"


def test_texts_that_do_not_do(corpus: Corpus, tmp_path: Path) -> None:
    path = write(tmp_path / "step1", their_config(PUBLISHED["hc"]), their_tensors(drawn(PUBLISHED["hc"]), "hc"))
    text = tmp_path / "text"
    text.write_text(text_of(sorted(topics)[:2]))
    with pytest.raises(UserError, match="has no tokenizer/ to read --text with"):
        text_tokens(OlmoSource(path), text)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "any.model").write_bytes(Path(corpus.tokenizer).read_bytes())
    with pytest.raises(UserError, match=f"the tokenizer gives id [0-9]+, the model has {SHAPE.vocab_size}"):
        text_tokens(OlmoSource(path), text)
    text.write_text("too short")
    with pytest.raises(UserError, match="tokens; 65 are the least"):
        text_tokens(OlmoSource(path), text)
    with pytest.raises(UserError, match="cannot read --text="):
        text_tokens(OlmoSource(path), tmp_path / "none")
