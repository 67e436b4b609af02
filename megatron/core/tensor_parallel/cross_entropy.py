"""Cross entropy of next-token prediction in FP32, without a whole batch of logits in memory.

GLM's vocabulary has 154,880 entries: FP32 logits of 8,192 rows and their gradient are 9.5 GiB. Rows are therefore taken
in chunks whose logits fit a byte budget, and with more than one chunk each is recomputed in backward, which costs one
more product with the output weight and keeps one chunk alive at a time. A batch that fits is computed once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_BYTES = 512 * 2**20


def vocab_parallel_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """FP32 loss of each row: logits ``[T, vocab]`` and targets ``[T]`` -> ``[T]``; ``ignore_index`` rows give 0."""
    # FP64 stays as it is, for gradient checks.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target, ignore_index=ignore_index, reduction="none")


def chunked_cross_entropy(
    hidden: Tensor, target: Tensor, logits_of: Callable[[Tensor], Tensor], rows_per_chunk: int
) -> Tensor:
    """``vocab_parallel_cross_entropy(logits_of(hidden), target)`` over chunks of rows.

    Args:
        hidden: ``[T, hidden]``.
        target: ``[T]`` int64.
        logits_of: rows -> their logits ``[rows, vocab]``.
        rows_per_chunk: see ``rows_in_budget``.
    """

    def loss_of(hidden_rows: Tensor, target_rows: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits_of(hidden_rows), target_rows)

    if hidden.shape[0] <= rows_per_chunk:
        return loss_of(hidden, target)
    chunks = zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
    return torch.cat([checkpoint(loss_of, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in chunks])


def rows_in_budget(vocab_size: int, budget: int = LOGIT_BYTES) -> int:
    """Rows whose FP32 logits fit ``budget`` bytes; at least one."""
    return max(budget // (4 * vocab_size), 1)
