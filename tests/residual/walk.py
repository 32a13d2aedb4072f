"""Every shipped architecture, and a stage run one sublayer at a time."""

from typing import Any

from torch import Tensor

from depthbench.config.load import read_yaml
from depthbench.model.stage import DecoderStage
from depthbench.paths import CONFIGS
from depthbench.residual.state import DepthState

SHIPPED = sorted(path.stem for path in (CONFIGS / "residual").glob("*.yaml"))


def shipped(name: str) -> tuple[str, dict[str, Any]]:
    """The architecture that configs/residual/<name>.yaml chooses, and its settings."""
    settings = read_yaml(CONFIGS / "residual" / f"{name}.yaml")
    return str(settings.pop("architecture")), settings


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
