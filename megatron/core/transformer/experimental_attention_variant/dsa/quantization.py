"""E4M3 with one scale a vector: what FP8 scoring rounds indexer queries and keys to, byte for byte.

The rule of ``ue8m0`` is that of the inference engines (DeepSeek, vLLM, LMDeploy)::

    a     = max(max_d |x_d|, 1e-4)
    scale = 2^e,  e = exponent of fl32(a / 448), plus 1 unless its mantissa is 0
    code  = E4M3, to nearest even, of x / scale

The exponent is read from the bits of the quotient: that equals ``ceil(log2(a / 448))`` for every FP32 value, while a
``log2`` in floating point is one step too small for a few FP32 values just above ``448 * 2^k``. A power of two makes
``x / scale`` exact, so only the codes round. ``fp32`` is SGLang's plain scale: ``a / 448``, and ``x * (1 / scale)``,
rounded. Neither needs a clamp: no quotient exceeds 448 by more than its rounding, and up to 464 rounds to 448.

A vector that holds NaN or infinity has no scale. The checked mode raises, which waits for the device; unchecked, the
whole vector becomes NaN (codes 0x7F, scale NaN) and so do its scores: what is selected then is not defined.

Left out: blocks other than one vector, since indexer heads are exactly one block of 128 wide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
SCALE_FORMATS = ("ue8m0", "fp32")
# The scoring option's values: what queries get, and what keys get.
OPERAND_FORMATS = {"ue8m0": ("ue8m0", "ue8m0"), "fp32": ("fp32", "fp32"), "fp32_k": ("ue8m0", "fp32")}

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1


class Quantized(NamedTuple):
    """A tensor in E4M3: ``values * scale`` over the last dimension.

    Attributes:
        values: ``float8_e4m3fn``, the shape that was quantized.
        scale: FP32, that shape without the last dimension.
    """

    values: Tensor
    scale: Tensor


def quantize_e4m3(x: Tensor, scale_format: str = "ue8m0", checked: bool = False) -> Quantized:
    """Quantize the vectors along the last dimension of ``x`` (any floating dtype, compared in FP32).

    Args:
        x: ``[..., D]``.
        scale_format: "ue8m0" or "fp32", see the module docstring.
        checked: raise if a vector is not finite; synchronizes the device.

    Raises:
        ValueError: an unknown format, or, in the checked mode, NaN or infinity.
    """
    require_format(scale_format)
    values = x.detach().float()
    amax = values.abs().amax(-1)
    bounded = amax.clamp(min=AMAX_FLOOR)
    if scale_format == "ue8m0":
        scale = _power_of_two_at_least(bounded * (1 / E4M3_MAX))
        scaled = values / scale.unsqueeze(-1)
    else:
        # By a tensor: PyTorch's CUDA kernels turn division by a number into multiplication by its rounded reciprocal.
        scale = bounded / torch.full_like(bounded, E4M3_MAX)
        scaled = values * (1 / scale).unsqueeze(-1)
    finite = amax.isfinite()
    scale = scale.where(finite, torch.nan)
    if checked:
        require_finite(scale)
    codes = scaled.where(finite.unsqueeze(-1), torch.nan)
    return Quantized(codes.to(torch.float8_e4m3fn), scale)


def require_format(scale_format: str) -> None:
    """Raise if ``quantize_e4m3`` has no such format."""
    if scale_format not in SCALE_FORMATS:
        raise ValueError(f"The FP8 scale format {scale_format!r} is unknown: use {' or '.join(SCALE_FORMATS)}.")


def require_finite(scale: Tensor) -> None:
    """Raise if a vector had no scale; synchronizes the device."""
    bad = int(scale.isnan().sum())
    if bad:
        raise ValueError(
            f"{bad} of {scale.numel()} indexer vectors hold NaN or infinity, which FP8 scoring cannot represent: find "
            "the layer that overflows, or score in 'bf16' to see how far it goes."
        )


def _power_of_two_at_least(x: Tensor) -> Tensor:
    """The smallest power of two that is no smaller than each positive, normal FP32 value."""
    bits = x.view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA_MASK) != 0).int()
    return (exponents << _MANTISSA_BITS).view(torch.float32)
