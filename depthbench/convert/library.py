"""transformers, which is needed to run models of its format, and not to write them."""

from typing import Any

from depthbench.errors import UserError


def installed_transformers() -> Any:
    """The module. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            'verification loads the export with transformers, which is missing: pip install "depthbench[convert]", '
            "or give --no-verify"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
