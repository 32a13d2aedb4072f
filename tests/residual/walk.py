"""Every shipped architecture, and a stage run one sublayer at a time."""

from typing import Any

from torch import Tensor

from depthbench.config.load import read_yaml
from depthbench.config.schema import RunConfig
from depthbench.model.stage import DecoderStage
from depthbench.paths import CONFIGS
from depthbench.residual.state import DepthState
from tests.models import small_run

SHIPPED = sorted(path.stem for path in (CONFIGS / "residual").glob("*.yaml"))


def shipped(name: str) -> tuple[str, dict[str, Any]]:
    """The architecture that configs/residual/<name>.yaml chooses, and its settings."""
    settings = read_yaml(CONFIGS / "residual" / f"{name}.yaml")
    return str(settings.pop("architecture")), settings


def shipped_run(name: str, **sections: dict[str, Any]) -> RunConfig:
    """Five layers: ten sublayers make blocks of two where a file asks for eight of them."""
    architecture, settings = shipped(name)
    return small_run(architecture, settings, **{**sections, "model": {"num_layers": 5, **sections.get("model", {})}})


def start(stage: DecoderStage, tokens_BS: Tensor) -> DepthState:
    return stage.residual.start(stage.embed(tokens_BS))


def run_sublayer(stage: DecoderStage, sublayer: int, state: DepthState) -> DepthState:
    block: Any = stage.blocks[str(sublayer // 2)]
    if sublayer % 2 == 0:
        read = block.attention_residual(state)
        y, taps = block.attention(read.hidden, read.depth_kv)
        return block.attention_residual.write(state, read, y, taps)
    read = block.mlp_residual(state)
    y, taps = block.mlp(read.hidden)
    return block.mlp_residual.write(state, read, y, taps)


def logits_from(stage: DecoderStage, sublayer: int, state: DepthState) -> Tensor:
    """The logits of a state that sublayers before `sublayer` left."""
    for k in range(sublayer, 2 * stage.span.num_layers):
        state = run_sublayer(stage, k, state)
    return stage.logits(state)
