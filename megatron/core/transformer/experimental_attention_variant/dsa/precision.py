"""Rounding at the scoring boundary, and the Hadamard rotation.

Indexer queries and keys may travel in any dtype (BF16, or FP32 with ``rope_fp32``); what they are *scored* in is
decided
here, once, by a backend's scoring function. BF16 rounding is straight-through: the forward value is the rounded one,
the
gradient passes unchanged in the carrier's precision. ``fp32`` rounds nothing and keeps FP64 as it is (parity tests and
gradient checks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends.protocol import IndexerInputs


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


def to_scoring_precision(indexer: IndexerInputs, precision: str) -> IndexerInputs:
    """Round q and k to what they are scored in, in their carriers' dtypes; the head weights are left alone.

    Raises:
        ValueError: ``precision`` is neither "bf16" nor "fp32".
    """
    if precision == "fp32":
        return indexer
    if precision != "bf16":
        raise ValueError(f"Scoring precision {precision!r} has no PyTorch rounding here: use 'bf16' or 'fp32'.")
    q_TID, k_SD = (_RoundToBf16.apply(x) for x in (indexer.q_TID, indexer.k_SD))  # type: ignore[no-untyped-call]
    return IndexerInputs(q_TID, k_SD, indexer.w_TI)


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
