"""Both kinds of tokenizer: round trip, control tokens, loading and its errors, deterministic training."""

import json
import os
import pickle
from pathlib import Path

import pytest
import tokenizers

from depthbench.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from depthbench.errors import UserError
from tests.data.helpers import HARD_TEXTS, make_documents

NEOX = Path(os.environ.get("DEPTHBENCH_NEOX_TOKENIZER", "allenai_gpt-neox-olmo-dolma-v1_5.json"))


@pytest.fixture(params=["hf_tokenizer", "sp_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    fixture: Tokenizer = request.getfixturevalue(request.param)
    return fixture


def test_text_round_trips_and_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    for text, ids in zip(HARD_TEXTS, tokenizer.encode_batch(HARD_TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        assert max(ids) < tokenizer.vocab_size


def test_pickle_keeps_everything(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.path, copy.fingerprint, copy.eod, copy.vocab_size) == (
        tokenizer.path,
        tokenizer.fingerprint,
        tokenizer.eod,
        tokenizer.vocab_size,
    )
    assert copy.encode_batch(HARD_TEXTS) == tokenizer.encode_batch(HARD_TEXTS)


def test_a_folder_stands_for_its_model(tokenizer: Tokenizer) -> None:
    assert load_tokenizer(tokenizer.path.parent).path == tokenizer.path


def test_ids(hf_tokenizer: Tokenizer, sp_tokenizer: Tokenizer) -> None:
    assert hf_tokenizer.eod == 0
    assert (sp_tokenizer.eod, sp_tokenizer.vocab_size) == (2, 400)


def test_saved_truncation_and_padding_are_ignored(hf_tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(hf_tokenizer.path))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))
    texts = make_documents(20)
    assert load_tokenizer(tmp_path).encode_batch(texts) == hf_tokenizer.encode_batch(texts)


def test_vocabulary_covers_ids_past_a_hole(hf_tokenizer: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(hf_tokenizer.path.read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 600
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).vocab_size == 601


def test_eod_can_be_named(hf_tokenizer: Tokenizer, sp_tokenizer: Tokenizer) -> None:
    assert load_tokenizer(hf_tokenizer.path, "<|padding|>").eod == 1
    assert load_tokenizer(sp_tokenizer.path, "<s>").eod == 1
    for tokenizer in (hf_tokenizer, sp_tokenizer):
        with pytest.raises(UserError, match=r"<none>.*--eod-token"):
            load_tokenizer(tokenizer.path, "<none>")


def test_loading_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(UserError, match="it holds neither"):
        load_tokenizer(tmp_path)
    for name, match in (("a.txt", "is no tokenizer"), ("a.json", "cannot be read"), ("a.model", "cannot be read")):
        (tmp_path / name).write_text("{}")
        with pytest.raises(UserError, match=match):
            load_tokenizer(tmp_path / name)
    (tmp_path / "b.model").write_text("")
    with pytest.raises(UserError, match=r"a.model, b.model"):
        load_tokenizer(tmp_path)


def test_training_is_deterministic_wherever_it_is_written(tmp_path: Path) -> None:
    texts = [*make_documents(200), "x" * 50_000]
    models = [train_sentencepiece(texts, tmp_path / name, 350).read_bytes() for name in ("one", "two.v2")]
    assert models[0] == models[1]
    assert (tmp_path / "two.v2.model").exists()


@pytest.mark.parametrize(("texts", "size"), [([], 400), (["a b c"], 4000), (["a b c"], 10)])
def test_training_errors(texts: list[str], size: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"vocabulary of {size} cannot be trained"):
        train_sentencepiece(texts, tmp_path / "m", size)


@pytest.mark.skipif(not NEOX.is_file(), reason="DEPTHBENCH_NEOX_TOKENIZER names no GPT-NeoX tokenizer.json")
def test_gpt_neox() -> None:
    tokenizer = load_tokenizer(NEOX)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50280, 50279)
    texts = HARD_TEXTS + make_documents(50)
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
