"""Megatron-Core's optimizer, and the few things asked of it."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.nn.utils import clip_grads_with_norm_

from depthbench.config.schema import OptimizerConfig, Precision, RunConfig

from .wrapped import WrappedModel


class Optimizer:
    """AdamW over a rank's chunks. A step is `prepare`, then `apply` or nothing."""

    def __init__(self, run: RunConfig, model: WrappedModel) -> None:
        self.config: OptimizerConfig = run.optimizer
        precision = run.train.precision
        config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=self.config.lr,
            min_lr=0.0,
            weight_decay=self.config.weight_decay,
            adam_beta1=self.config.beta1,
            adam_beta2=self.config.beta2,
            adam_eps=self.config.eps,
            clip_grad=self.config.clip_norm,
            bf16=precision is Precision.BF16,
            params_dtype=model.context.megatron.params_dtype,
            use_distributed_optimizer=run.parallel.distributed_optimizer,
            overlap_param_gather=run.parallel.overlap_param_gather,
        )
        exempt: Any = {ParamKey(attr="without_decay"): {"wd_mult": 0.0}}
        self.model = model
        self.dtype = torch.promote_types(model.context.megatron.params_dtype, torch.float32)
        self.chained = get_megatron_optimizer(
            config, model.chunks, config_overrides=exempt, use_gloo_process_groups=False
        )
        self.inner = self.chained.chained_optimizers[0]

    def zero_grad(self) -> None:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.chained.zero_grad()

    def prepare(self) -> float:
        """Bring the reduced gradients to where the update reads them; returns their global norm, before clipping.

        Megatron-Core's own norm, without Transformer Engine or Apex, waits for the device once a parameter, and adds up
        in float32 whatever the gradients are.
        """
        self.chained.prepare_grads()
        tp_group = self.model.context.tp_group
        grads = [
            main.grad
            for main in self.inner.get_parameters()
            if main.grad is not None
            and param_is_not_shared(main)
            and param_is_not_tensor_parallel_duplicate(main, tp_group)  # else another rank counts it
        ]
        norms = torch._foreach_norm(grads, dtype=self.dtype) if grads else []
        square = torch.zeros((), dtype=self.dtype, device=torch.cuda.current_device())
        for norm in norms:
            square += norm.square()
        with self.model.waiting("other ranks' gradient norm"):
            dist.all_reduce(square, group=self.inner.get_grad_stats_parallel_group())
            dist.all_reduce(square, dist.ReduceOp.MAX)  # replicas may differ in the last digit, and must decide alike
            return math.sqrt(float(square))

    def apply(self, lr: float, grad_norm: float) -> None:
        """Clip by the norm that `prepare` returned and update the weights."""
        for group in self.chained.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        if self.config.clip_norm > 0:
            # torch's, since Megatron-Core's clips float32 gradients alone
            total = torch.tensor(grad_norm, dtype=self.dtype, device=torch.cuda.current_device())
            clip_grads_with_norm_(self.inner.get_parameters(), self.config.clip_norm, total)
        self.chained.step_with_ready_grads()

    def weights_are_current(self) -> None:
        """Finish a gather of updated weights that `overlap_param_gather` left for the next forward pass."""
        for chunk in self.model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.inner.optimizer
        return optimizer
