"""RoPE and YaRN: one implementation for the main attention and for the DSA indexer.

Tables are made inside the call, from integer positions, in FP32, and only then cast: positions above 256 are not exact
in BF16, and a module that is cast or sharded in BF16 has no table to lose. The frequencies are therefore a plain
attribute, copied to each device once, and no buffer. Their arithmetic is FP32 as well (not FP64 rounded once), because
that is what transformers and the inference engines compute, and one unit in the last place is 0.01 rad at position
131,072.

YaRN follows its paper (Peng et al., 2023) in DeepSeek's form: the factor on cos and sin is
``g(mscale) / g(mscale_all_dim)`` with ``g(m) = 0.1 m ln(factor) + 1``, and the softmax scale is multiplied by
``g(mscale_all_dim)^2``. Neither depends on the sequence length.

Shape legend: T rows, P rotary pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron.core.transformer.transformer_config import MLATransformerConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary angles (RoFormer, Su et al., 2021). Has no parameters and no buffers.

    Args:
        dim: rotated width; even, 0 for none.
        base: base of the frequencies, ``base ** (-2 i / dim)``.
        factor: multiplies both tables.
    """

    def __init__(self, dim: int, base: float, factor: float = 1.0) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.factor = float(factor)
        self._frequencies_by_device: dict[torch.device, Tensor] = {}

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables ``(cos, sin)``, each ``[T, dim / 2]`` in ``dtype``, for integer positions ``[T]``."""
        angles_TP = positions_T.float()[:, None] * self._frequencies_on(positions_T.device)
        return (angles_TP.cos() * self.factor).to(dtype), (angles_TP.sin() * self.factor).to(dtype)

    def frequencies(self) -> Tensor:
        """Angle of one position step for each pair, FP32 ``[dim / 2]`` on the CPU."""
        return 1.0 / self._periods()

    def _periods(self) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        return self.base**exponents

    def _frequencies_on(self, device: torch.device) -> Tensor:
        if device not in self._frequencies_by_device:
            self._frequencies_by_device[device] = self.frequencies().to(device)
        return self._frequencies_by_device[device]


class YarnRotaryEmbedding(RotaryEmbedding):
    """YaRN: pairs that turn often keep their frequency, slow pairs are stretched by ``scaling_factor``.

    Args:
        config: its ``qk_pos_emb_head_dim``, ``rotary_*``, ``original_max_position_embeddings``, ``beta_*`` and
            ``mscale*`` are read.
    """

    def __init__(self, config: MLATransformerConfig) -> None:
        numerator = yarn_magnitude(config.rotary_scaling_factor, config.mscale)
        denominator = yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim)
        super().__init__(config.qk_pos_emb_head_dim, config.rotary_base, numerator / denominator)
        self.scaling_factor = config.rotary_scaling_factor
        self.original_length = config.original_max_position_embeddings
        self.betas = (config.beta_fast, config.beta_slow)

    def frequencies(self) -> Tensor:
        """Angle of one position step for each pair, FP32 ``[dim / 2]`` on the CPU."""
        periods_P = self._periods()
        first, last = (self._pair_that_turns(beta) for beta in self.betas)
        first, last = max(math.floor(first), 0), min(math.ceil(last), self.dim - 1)
        pairs_P = torch.arange(self.dim // 2, dtype=torch.float32, device="cpu")
        # Equal ends would divide by zero; the ramp is then a step.
        ramp_P = ((pairs_P - first) / max(last - first, 1e-3)).clamp(0, 1)
        kept_P = 1 - ramp_P
        return 1.0 / (self.scaling_factor * periods_P) * (1 - kept_P) + 1.0 / periods_P * kept_P

    def _pair_that_turns(self, rotations: float) -> float:
        """The (fractional) pair that makes so many rotations over the original context."""
        return self.dim * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(self.base))


def build_rotary_embedding(config: MLATransformerConfig) -> RotaryEmbedding:
    """The model's rotary embedding, of width ``qk_pos_emb_head_dim``, as ``rope_type`` says."""
    if config.rope_type == "yarn":
        return YarnRotaryEmbedding(config)
    if config.rope_type == "rope":
        return RotaryEmbedding(config.qk_pos_emb_head_dim, config.rotary_base)
    raise ValueError(f'rope_type={config.rope_type!r} was given, but "rope" and "yarn" are supported; choose one.')


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's ``g``: 1 without extension, else ``0.1 * mscale * ln(factor) + 1``."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(config: MLATransformerConfig) -> float:
    """Factor on attention logits: ``(nope + rope) ** -0.5``, times YaRN's ``g(mscale_all_dim) ** 2``."""
    scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
    if config.rope_type == "yarn":
        scale *= yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    return scale


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the whole last dimension of ``x``; every entry keeps its place.

    Args:
        x: ``[T, ..., rope_dim]``; a width of 0 has nothing to rotate.
        cos, sin: ``[T, rope_dim / 2]``, broadcast over the dimensions between.
        interleaved: pairs are ``(2 i, 2 i + 1)``; else ``(i, i + rope_dim / 2)``.

    Returns:
        The shape and data type of ``x``. The arithmetic runs in the wider of the two types: FP32 tables give an FP32
        rotation of BF16 inputs, rounded once at the end.
    """
    if x.shape[-1] == 0:
        return x
    table_shape = (x.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(table_shape), sin.view(table_shape)
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pair_dim = -1 if interleaved else -2
    first, second = pairs.unbind(pair_dim)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=pair_dim)
    return rotated.flatten(-2).to(x.dtype)
