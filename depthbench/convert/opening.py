"""Which format a folder is in that somebody wants to import."""

from pathlib import Path

from depthbench.errors import UserError

from .huggingface import CONFIG, HuggingFaceFolder
from .olmo import OlmoSource, is_olmo
from .source import Source


def open_source(path: Path) -> Source:
    """The model in the folder `path`.

    Raises UserError where it is none of the formats known here, or one whose model is not ours.
    """
    if not path.is_dir():
        raise UserError(f"no folder {path}")
    if is_olmo(path):
        return OlmoSource(path)
    if (path / CONFIG).is_file():
        return HuggingFaceFolder(path)
    raise UserError(
        f"{path} is no model to import: a Hugging Face folder has a {CONFIG}, a checkpoint of DepthBench's code a "
        "model_and_optim/ as well, and both are missing"
    )
