"""The backbone's shape."""

from dataclasses import asdict, dataclass
from typing import Any

from depthbench.errors import UserError
from depthbench.residual import Shape

from .rope_scaling import RopeScaling

VOCAB_MULTIPLE = 128  # rows per rank are padded to this: matmul tiles, and any vocabulary divides over any TP
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "sequence_length")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Llama-like backbone: bias-free, SwiGLU, RoPE; norms belong to the residual architecture.

    num_kv_heads: null means one per attention head (MHA). head_dim: null means hidden_size / num_attention_heads.
    init_std: nominal deviation of every weight's truncated normal.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    vocab_size: int
    sequence_length: int = 2048
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name}={value} must be at least 1, or null")
        for name in ("rope_theta", "init_std"):
            if not getattr(self, name) > 0:
                raise UserError(f"model.{name}={getattr(self, name)} must be above 0")
        if self.rope_scaling and not self.rope_scaling.factor >= 1:
            raise UserError(f"model.rope_scaling.factor={self.rope_scaling.factor} must be at least 1")
        if self.rope_scaling and not self.rope_scaling.low_freq_factor < self.rope_scaling.high_freq_factor:
            raise UserError(
                f"model.rope_scaling.low_freq_factor={self.rope_scaling.low_freq_factor} must be below "
                f"high_freq_factor={self.rope_scaling.high_freq_factor}"
            )
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise UserError(
                f"model.hidden_size={self.hidden_size} is not divisible by model.num_attention_heads={heads}; "
                "set model.head_dim"
            )
        if heads % self.kv_heads:
            raise UserError(
                f"model.num_attention_heads={heads} is not a multiple of model.num_kv_heads={self.kv_heads}"
            )
        if self.head_size % 2:
            raise UserError(f"the head dimension is {self.head_size}, but RoPE rotates pairs: it must be even")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def in_effect(self) -> dict[str, Any]:
        """Every field with the value that holds; last those for which null may stand."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("num_kv_heads", "head_dim")}
        return {**fields, "num_kv_heads": self.kv_heads, "head_dim": self.head_size}

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the vocabulary's tables over all ranks."""
        multiple = VOCAB_MULTIPLE * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @property
    def residual_shape(self) -> Shape:
        return Shape(self.num_layers, self.hidden_size, self.num_attention_heads, self.kv_heads, self.head_size)
