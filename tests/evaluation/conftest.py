from pathlib import Path

import pytest

from tests.corpora import Corpus

from .exports import exported


@pytest.fixture(scope="package")
def exports(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain Llama and a model with code of its own."""
    return exported(corpus, tmp_path_factory.mktemp("evaluated"))
