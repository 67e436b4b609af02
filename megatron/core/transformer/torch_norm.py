"""RMSNorm and LayerNorm with FP32 arithmetic.

The order of roundings is transformers': normalize in FP32, cast to the input's type, then multiply by the weight. (One
fused call would multiply before the cast, and BF16 results would differ in the last bit.) FP64 inputs stay FP64.

With sequence parallelism each tensor-parallel rank norms its own rows, so the weights' gradients are summed over ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.shards import sum_gradient_over_tp
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        config: gives the data type of the weight, and whether it is stored as an offset from 1.
        hidden_size: width of the last dimension.
        eps: added to the mean square; ``layernorm_epsilon`` when None.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        if config.sequence_parallel:
            sum_gradient_over_tp(self.weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the norm's factor one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden_size]`` -> the same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, self.weight.shape, None, self.eps).to(x.dtype)
        return normed * (self.weight + 1 if self.zero_centered else self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
