"""A rank's part of a micro-batch: zigzag rows over context-parallel ranks, padding for whoever shares rows out.

Each document is cut into ``2 * cp`` chunks, of which rank r takes chunks r and ``2 * cp - 1 - r``, so that every rank
sees as many pairs of row and key as the others. Documents that do not divide are padded at their end, and the whole row
is padded by one more document, without a single real token, until tensor-parallel ranks can share it out evenly. Real
lengths stay apart from padded ones: padding is in no segment of the layout, has no loss, and moves no position, which
is counted within its document. A batch that needs no padding keeps its shape ``[b, s / cp]``.

Data-parallel ranks take different samples (``sampler.py``), tensor-parallel ranks take the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training.data.batch import Batch

# Cross entropy gives rows with this target no loss.
_NO_LABEL = -100


def shard_batch(batch: Batch, cp_size: int, cp_rank: int, tp_size: int) -> Batch:
    """The rows of one context-parallel rank; ``packed_seq_params`` goes on describing the rows of all of them."""
    if cp_size * tp_size == 1:
        return batch
    samples, length = batch.tokens.shape
    packed = batch.packed_seq_params
    chunks = 2 * cp_size if cp_size > 1 else 1
    if packed is None and length % chunks == 0 and samples * (length // cp_size) % tp_size == 0:
        return batch if cp_size == 1 else _plain_rows(batch, cp_size, cp_rank)
    offsets = tuple(range(0, (samples + 1) * length, length)) if packed is None else packed.offsets
    assert offsets is not None and (packed is None or packed.padded_offsets is None)
    offsets, padded = pad_offsets(offsets, cp_size, tp_size)
    source = zigzag_source(offsets, padded, cp_size, cp_rank)

    def take(rows: Tensor, padding: int) -> Tensor:
        flat = torch.cat((rows.flatten(), rows.new_full((1,), padding)))
        return flat[source][None]

    rows = take(batch.tokens, 0), take(batch.labels, _NO_LABEL), take(batch.loss_mask, 0)
    return Batch(*rows, PackedSeqParams.from_offsets(offsets, padded))


def pad_offsets(offsets: Sequence[int], cp_size: int, tp_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Real and padded cumulative lengths, with an empty document behind where rows must divide by ``tp_size``."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = [0]
    for start, stop in pairwise(offsets):
        padded.append(padded[-1] + -(-(stop - start) // multiple) * multiple)
    real = list(offsets)
    filler = 0
    while (padded[-1] + filler) // cp_size % tp_size:
        filler += multiple
    if filler:
        real.append(real[-1])
        padded.append(padded[-1] + filler)
    return tuple(real), tuple(padded)


def zigzag_source(offsets: Sequence[int], padded: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """Where each of the rank's rows stands in the unpadded row, int64; -1 on padding."""
    rows = [torch.empty(0, dtype=torch.int64)]
    for (start, stop), (padded_start, padded_stop) in zip(pairwise(offsets), pairwise(padded), strict=True):
        size = padded_stop - padded_start
        chunk = size // (2 * cp_size) if cp_size > 1 else size
        firsts = (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk) if cp_size > 1 else (0,)
        for first in firsts:
            ids = torch.arange(start + first, start + first + chunk)
            rows.append(ids.masked_fill(ids >= stop, -1))
    return torch.cat(rows)


def _plain_rows(batch: Batch, cp_size: int, cp_rank: int) -> Batch:
    def take(rows: Tensor) -> Tensor:
        chunks = rows.unflatten(1, (2 * cp_size, -1))
        return chunks[:, [cp_rank, 2 * cp_size - 1 - cp_rank]].flatten(1)

    return Batch(take(batch.tokens), take(batch.labels), take(batch.loss_mask), None)
