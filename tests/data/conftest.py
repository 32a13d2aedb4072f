"""Small tokenizers that the tests of this folder share."""

import pytest
import tokenizers

from depthbench.data.tokenizers import Tokenizer, load_tokenizer, train_sentencepiece
from tests.data.helpers import make_documents


@pytest.fixture(scope="session")
def hf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(make_documents(300), trainer)
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def sp_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(train_sentencepiece(make_documents(300), tmp_path_factory.mktemp("sp") / "spm", 400))


@pytest.fixture
def documents() -> list[str]:
    return make_documents(60)
