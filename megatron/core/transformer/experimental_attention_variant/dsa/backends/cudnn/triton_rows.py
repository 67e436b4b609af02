"""Row kernels of the KL loss, in Triton: the loss itself, and the operands of the sparse backward kernel.

Legend: R rows, N columns of a row (selected or visible keys), K selected keys.

The library's kernels give scores, targets and gradients, but not the loss. ``kl_rows`` reads the two matrices once
(twice where a row exceeds one block) and goes by row lengths, so garbage past a row's end, a leaked future key
included, reaches neither the loss nor the log-sum-exp and the mass that the gradient kernels take.

``backward_rows`` normalizes a target and turns scores into the prediction, into fresh matrices of the kernel's width:
the backward kernel overwrites its target, and zeros past a row's end keep garbage there out of the gradients.

Compilations: Triton would make a variant wherever an integer is 1 or a multiple of 16, and wherever a pointer is
aligned. Loads are masked by a row's length, which no vector width need divide, so alignment buys them nothing: what
changes from batch to batch is not specialized. ``width`` is, which is the model's and lets the stores be vectorized.

Left out: another order of the slots. Rotating each row's slots, so that neighbouring rows do not add to the same keys
at the same time, was measured and changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
# exp(-100), below which the objective's log-prediction is floored, is no normal FP32 number. The backward kernel
# compares with it, so a floored slot says so by a negative prediction, and an unfloored one by a normal positive one.
TINY = 1.1754944e-38


def kl_rows(target_RN: Tensor, scores_RN: Tensor, length_R: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 ``[R]`` each: KL of a row's first ``length`` columns, log-sum-exp of its scores, mass of its target."""
    rows = target_RN.shape[0]
    kl_R, lse_R, mass_R = (torch.empty(rows, dtype=torch.float32, device=target_RN.device) for _ in range(3))
    if rows:
        _kl_kernel[(rows,)](
            target_RN, scores_RN, length_R, kl_R, lse_R, mass_R,
            target_RN.stride(0), scores_RN.stride(0), floor, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return kl_R, lse_R, mass_R


def backward_rows(
    target_RK: Tensor, scores_RK: Tensor, stats: tuple[Tensor, Tensor, Tensor], width: int, floor: float
) -> tuple[Tensor, Tensor]:
    """Normalized target and prediction ``[R, width]``, 0 past the length; ``stats`` = (length, lse, mass)."""
    rows = target_RK.shape[0]
    target = torch.empty((rows, width), dtype=torch.float32, device=target_RK.device)
    predict = torch.empty_like(target)
    if rows:
        _backward_kernel[(rows,)](
            target_RK, scores_RK, *stats, target, predict,
            target_RK.stride(0), scores_RK.stride(0), width, floor, BLOCK=BLOCK, TINY=TINY, num_warps=8,
        )  # fmt: skip
    return target, predict


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["target", "scores", "lengths", "target_stride", "scores_stride"]
)
def _kl_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    target, scores, lengths, kl, lse, mass, target_stride, scores_stride, floor, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    columns = tl.arange(0, BLOCK)
    target += row * target_stride
    scores += row * scores_stride
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + columns < length
        s = tl.load(scores + start + columns, mask=inside, other=float("-inf"))
        t = tl.load(target + start + columns, mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(s, 0))
        total = total * tl.exp(peak - new_peak) + tl.sum(tl.exp(s - new_peak), 0)
        peak = new_peak
        weight += tl.sum(t, 0)
    row_lse = tl.where(length > 0, peak + tl.log(total), 0.0)
    scale = 1.0 / tl.maximum(weight, 1.1754944e-38)
    loss = tl.full((), 0.0, tl.float32)
    for start in range(0, length, BLOCK):
        inside = start + columns < length
        s = tl.load(scores + start + columns, mask=inside, other=0.0)
        p = tl.load(target + start + columns, mask=inside, other=0.0) * scale
        term = p * (tl.log(tl.where(p > 0.0, p, 1.0)) - tl.maximum(s - row_lse, floor))
        loss += tl.sum(tl.where(inside & (p > 0.0), term, 0.0), 0)
    tl.store(kl + row, loss)
    tl.store(lse + row, row_lse)
    tl.store(mass + row, weight)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["target", "scores", "lengths", "lse", "mass", "target_stride", "scores_stride"]
)
def _backward_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    target, scores, lengths, lse, mass, out_target, out_predict, target_stride, scores_stride, width, floor,
    BLOCK: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    row_lse = tl.load(lse + row)
    scale = 1.0 / tl.maximum(tl.load(mass + row), TINY)
    for start in range(0, width, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        inside = slots < length
        p = tl.load(target + row * target_stride + slots, mask=inside, other=0.0) * scale
        log_predict = tl.load(scores + row * scores_stride + slots, mask=inside, other=0.0) - row_lse
        predict = tl.where(log_predict >= floor, tl.maximum(tl.exp(log_predict), TINY), -TINY)
        tl.store(out_target + row * width + slots, p, mask=slots < width)
        tl.store(out_predict + row * width + slots, tl.where(inside, predict, 0.0), mask=slots < width)
