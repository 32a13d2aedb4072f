"""The upcycling table of docs/import.md says of every architecture what its code says; numbers are not run again."""

import re
from pathlib import Path

from depthbench.config.load import group_file, read_yaml
from depthbench.model.config import ModelConfig
from depthbench.paths import CONFIGS
from depthbench.residual import architecture

PAGE = Path(__file__).parents[2] / "docs" / "import.md"
MODEL = ModelConfig(24, 128, 352, 8, 512, num_kv_heads=4)


def test_every_architecture_is_described_as_it_is() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (the same|another: [^|]+) \|", PAGE.read_text(), re.MULTILINE))
    said = {}
    for path in (CONFIGS / "residual").glob("*.yaml"):
        settings = read_yaml(group_file("residual", path.stem))
        described = architecture(settings.pop("architecture"))
        answer = described(described.Config(**settings), MODEL.residual_shape).from_pre_ln(1e-5)
        assert answer
        said[path.stem] = f"another: {answer.different}" if answer.different else "the same"
    assert rows == said
