"""transformers, which is needed to run models of its format, and not to write them."""

import importlib.util
from typing import Any

from depthbench.errors import UserError


def need_transformers() -> None:
    """Raise UserError where it is not installed. It is not imported, which takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            'verification runs models with transformers, which is missing: pip install "depthbench[convert]", or give '
            "--no-verify"
        )


def installed_transformers() -> Any:
    """The module. Raises UserError where it is not installed."""
    need_transformers()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
