"""Configuration of depthbench's Hugging Face models."""

from typing import Any

from transformers import PretrainedConfig


class DepthBenchConfig(PretrainedConfig):
    """A Llama-like decoder (bias-free, SwiGLU, RoPE, grouped queries) whose residual connection is one of depthbench's.

    residual_architecture: its name. residual: its settings, as in a run's YAML.
    position_scaling: null, or `kind` (linear, ntk, yarn, llama3), `factor`, `original_sequence_length`, `beta_fast` and
        `beta_slow`. Not called `rope_scaling`, which transformers rewrites, differently from version to version.
    """

    model_type = "depthbench"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.extra.*": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    def __init__(
        self,
        residual_architecture: str = "",
        residual: dict[str, Any] | None = None,
        vocab_size: int = 32000,
        hidden_size: int = 1024,
        intermediate_size: int = 2736,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        rope_theta: float = 10000.0,
        position_scaling: dict[str, Any] | None = None,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.residual_architecture = residual_architecture
        self.residual = residual or {}
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.position_scaling = position_scaling
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **kwargs})
