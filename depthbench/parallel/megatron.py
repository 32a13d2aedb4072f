"""The config object that Megatron-Core's layers, schedules, DDP and optimizer read, from ours."""

from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from depthbench.config.schema import Precision, RunConfig

DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.REFERENCE: torch.bfloat16,
    Precision.FP32: torch.float32,
    Precision.FP64: torch.float64,
}


def finalize_gradients(model: Any, num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron-Core's reduction of gradients and division by the global number of tokens; in float64, since it divides
    by a tensor, and an integer tensor's reciprocal would be float32."""
    finalize_model_grads(model, None if num_tokens is None else num_tokens.double(), **groups)


def megatron_config(run: RunConfig) -> TransformerConfig:
    """Everything that fuses or guesses is off: weights are filled by `model.init`, RoPE and norms are our own."""
    model, parallel = run.model, run.parallel
    dtype = DTYPES[run.train.precision]
    return TransformerConfig(
        # Megatron-Core looks at the number of layers to see that it divides; ours need not
        num_layers=parallel.pipeline * parallel.virtual_pipeline,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        kv_channels=model.head_size,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        pipeline_dtype=dtype,
        microbatch_group_size_per_vp_stage=run.pipeline.microbatch_group,
        overlap_p2p_comm=run.pipeline.overlap_p2p,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,  # our messages outlive it: pipeline.communicator
        sequence_parallel=parallel.shards_tokens,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        add_bias_linear=False,
        gated_linear_unit=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        gradient_accumulation_fusion=False,  # needs Apex
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_gradients,
        deterministic_mode=run.train.deterministic,
    )
