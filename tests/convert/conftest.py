"""transformers is imported here, once, so that forked workers need not."""

import pytest

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401
