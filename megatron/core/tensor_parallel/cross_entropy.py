"""Cross entropy of next-token prediction in FP32, without a whole batch of logits in memory.

GLM's vocabulary has 154,880 entries: FP32 logits of 8,192 rows and their gradient are 9.5 GiB. Rows are therefore taken
in chunks whose logits fit a byte budget, and with more than one chunk each is recomputed in backward, which costs one
more product with the output weight and keeps one chunk alive at a time. A batch that fits is computed once.

Where tensor-parallel ranks share the vocabulary, each holds its own columns of the logits, and three numbers a row
cross between them: the largest logit, the sum of exponentials, and the target's logit (the last two at once).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron.core.tensor_parallel.mappings import group_rank, group_size

LOGIT_BYTES = 512 * 2**20


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, tp_group: ProcessGroup | None = None
) -> Tensor:
    """FP32 loss of each row; ``ignore_index`` rows give 0.

    Args:
        logits: ``[T, vocab]``, or with ``tp_group`` own columns of it ``[T, vocab / ranks]``.
        target: int64 ``[T]``, the same on every rank.
        ignore_index: target of rows without a loss.
        tp_group: ranks that share the vocabulary in equal parts; all of them get the same losses.
    """
    # FP64 stays as it is, for gradient checks.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if group_size(tp_group) == 1:
        return F.cross_entropy(wide, target, ignore_index=ignore_index, reduction="none")
    loss: Tensor = _VocabParallelCrossEntropy.apply(wide, target, ignore_index, tp_group)
    return loss


def require_in_range(what: str, ids: Tensor, size: int) -> None:
    """Refuse ids that no rank holds: each would take them for another rank's. On a GPU the device does, when it gets
    there, as it does for a table in one piece.

    Raises:
        IndexError: an id is negative, or ``size`` or more.
    """
    inside = (ids >= 0) & (ids < size)
    if ids.is_cuda:
        torch._assert_async(inside.all(), f"{what} out of range: ids go from 0 to {size - 1}.")
    elif not inside.all():
        raise IndexError(f"{what} {int(ids[~inside][0])} is out of range: ids go from 0 to {size - 1}.")


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """``log sum exp(logits) - logits[target]`` over the columns of all ranks; -inf columns are no entries."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, group: ProcessGroup) -> Tensor:
        columns = logits.shape[1]
        require_in_range("Target", target.masked_fill(target == ignore_index, 0), columns * group_size(group))
        local = target - group_rank(group) * columns
        own = (local >= 0) & (local < columns) & (target != ignore_index)
        local = local.masked_fill(~own, 0)[:, None]
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        chosen = shifted.gather(1, local).squeeze(1).masked_fill(~own, 0)
        probabilities = shifted.exp_()
        sums = torch.stack((probabilities.sum(dim=1), chosen))
        dist.all_reduce(sums, group=group)
        probabilities /= sums[0][:, None]
        ctx.save_for_backward(probabilities, local, own, target == ignore_index)
        return (sums[0].log() - sums[1]).masked_fill(target == ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, own, ignored = ctx.saved_tensors
        grad = probabilities.scatter_add(1, local, -own[:, None].to(probabilities.dtype))
        return grad * grads[0].masked_fill(ignored, 0)[:, None], None, None, None


def chunked_cross_entropy(
    hidden: Tensor,
    target: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    rows_per_chunk: int,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """``vocab_parallel_cross_entropy(logits_of(hidden), target)`` over chunks of rows.

    Args:
        hidden: ``[T, hidden]``.
        target: ``[T]`` int64.
        logits_of: rows -> their logits ``[rows, vocab]``, own columns where ranks share the vocabulary.
        rows_per_chunk: see ``rows_in_budget``.
        tp_group: ranks that share the vocabulary.
    """

    def loss_of(hidden_rows: Tensor, target_rows: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits_of(hidden_rows), target_rows, tp_group=tp_group)

    if hidden.shape[0] <= rows_per_chunk:
        return loss_of(hidden, target)
    chunks = zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
    return torch.cat([checkpoint(loss_of, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks])


def rows_in_budget(vocab_size: int, budget: int = LOGIT_BYTES) -> int:
    """Rows whose FP32 logits fit ``budget`` bytes; at least one."""
    return max(budget // (4 * vocab_size), 1)
