"""Rounding at the scoring boundary, and the Hadamard rotation.

Indexer queries and keys may travel in any dtype (BF16, or FP32 with ``rope_fp32``); what they are *scored* in is
decided here, once, by a backend's scoring function, and shows in the operands' type. BF16 rounding is straight-through:
the forward value is the rounded one, the gradient passes unchanged in the carrier's precision. ``fp32`` rounds nothing
and keeps FP64 as it is (parity tests and gradient checks). ``fp8`` gives ``QuantizedInputs`` without gradients, their
head weights multiplied by the queries' scales in FP32: with BF16 weights other keys than the inference engines' are
selected.

FP8 scale formats are named after what engines do: "ue8m0" for both operands; "fp32" for both (SGLang's fused kernels,
GLM); "fp32_k" for the keys alone (SGLang's other path, DeepSeek-V3.2). SGLang's plain key scales come from BF16 keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .backends.protocol import IndexerInputs, QuantizedInputs
from .quantization import OPERAND_FORMATS, Quantized, quantize_e4m3

__all__ = [
    "Quantized",
    "compute_dtype",
    "hadamard_rotate",
    "quantize_e4m3",
    "quantize_operands",
    "to_scoring_precision",
]


def compute_dtype(x: Tensor) -> torch.dtype:
    """FP32, or FP64 where ``x`` already is: the arithmetic of everything that must not lose bits."""
    return torch.promote_types(x.dtype, torch.float32)


class _RoundToBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def to_scoring_precision(
    indexer: IndexerInputs, precision: str, scale_format: str = "ue8m0", checked: bool = False
) -> IndexerInputs | QuantizedInputs:
    """Round q and k to what they are scored in: "bf16" and "fp32" in their carriers' dtypes, "fp8" as codes and scales.

    ``scale_format`` and ``checked`` are for FP8 alone (``quantize_operands``).

    Raises:
        ValueError: the precision is unknown, or what ``quantize_operands`` raises.
    """
    if precision == "fp32":
        return indexer
    if precision == "fp8":
        return quantize_operands(indexer, scale_format, checked)
    if precision != "bf16":
        raise ValueError(f"Scoring precision {precision!r} is unknown: use 'bf16', 'fp8' or 'fp32'.")
    q_TID, k_SD = (_RoundToBf16.apply(x) for x in (indexer.q_TID, indexer.k_SD))  # type: ignore[no-untyped-call]
    return IndexerInputs(q_TID, k_SD, indexer.w_TI)


def quantize_operands(
    indexer: IndexerInputs,
    scale_format: str = "ue8m0",
    checked: bool = False,
    quantize: Callable[[Tensor, str, bool], Quantized] = quantize_e4m3,
) -> QuantizedInputs:
    """The operands in FP8.

    Keys with plain scales are rounded to BF16 first, as the engines that use these scales do, in a pass of its own: the
    one key head is a fraction of the queries' heads, so a flag in the kernel would save next to nothing.

    Args:
        indexer: operands in any dtype.
        scale_format: "ue8m0", "fp32" or "fp32_k", see the module docstring.
        checked: raise if q or k holds NaN or infinity, padding included; synchronizes the device.
        quantize: what quantizes a tensor; a kernel must give the bytes of ``quantize_e4m3``.

    Raises:
        ValueError: the format is unknown, or an operand is not finite in the checked mode.
    """
    if scale_format not in OPERAND_FORMATS:
        raise ValueError(f"The FP8 scale format {scale_format!r} is unknown: use {', '.join(OPERAND_FORMATS)}.")
    q_format, k_format = OPERAND_FORMATS[scale_format]
    q_TID, k_SD = indexer.q_TID.detach(), indexer.k_SD.detach()
    q = quantize(q_TID, q_format, checked)
    k = quantize(k_SD.to(torch.bfloat16) if k_format == "fp32" else k_SD, k_format, checked)
    return QuantizedInputs(q, k, indexer.w_TI.detach().float() * q.scale)


def hadamard_rotate(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension, butterflies in FP32, rounded once to ``x.dtype``.

    Sylvester order, scaled by ``D^-0.5``, so applying it twice gives ``x`` back. Scores do not change in exact
    arithmetic; what rounding does to outlier channels does (DeepSeek-V3.2's FP8 indexer).

    Raises:
        ValueError: the last dimension is no power of two.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(
            f"The Hadamard rotation got {width} channels, but needs a power of two: change the head width."
        )
    y: Tensor = x.to(compute_dtype(x))
    half = 1
    while half < width:
        pairs = y.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    rotated: Tensor = y * width**-0.5
    return rotated.to(x.dtype)
