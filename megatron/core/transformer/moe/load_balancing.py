"""The sequence-level balance loss of DeepSeek-V3 (section 2.1.2, equations 17 to 20), and what it is scaled by.

For one document of ``t`` rows, ``L = sum_e f_e P_e``: ``f_e`` is ``E / (K t)`` times the rows that have e among their K
best scores, ``P_e`` the mean of the rows' scores, normalized to sum to 1. The ranking is of plain scores: neither the
expert bias nor groups take part, as in the paper and in Megatron-LM.

Scaling follows the indexer's KL loss: a document's ``L`` counts once a row, and what is back-propagated is
``moe_aux_loss_coeff * grad_scale * (sum over documents of t * L) / normalizer``. So it follows the main loss through
microbatches, gradient accumulation and loss scaling, and where the normalizer is global it does not depend on how
documents are spread over microbatches. With documents of one length and the default normalizer it is Megatron-LM's
mean over the sequences of a microbatch.

A document's rows may lie on several tensor- and context-parallel ranks. The counts behind ``f_e`` are summed over them,
without a gradient. ``L`` is linear in each row's scores, so every rank then adds up, and back-propagates, the share of
its own rows: the loss is the sum of the shares, and nothing is sent back. Ranks number documents alike: in order where
each knows all of them, else (zigzag rows, of which a short document leaves some ranks none) by the place of their first
key, a multiple of twice the context-parallel ranks. So the message then has ``num_keys / (2 * cp)`` rows of E counts.

Shape legend: T rows, E experts, K experts chosen, N documents, or places of documents.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.mappings import group_size, own_rows
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds, valid_rows

_CACHED_VIEWS = 16  # of a few microbatches; what is kept is device memory


def sequence_balance_loss(
    scores_TE: Tensor,
    topk: int,
    layout: Layout,
    tp_group: ProcessGroup | None = None,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Own rows' share of the sum over documents of rows times balance loss, an FP32 scalar.

    Args:
        scores_TE: scores of the valid rows of this rank's part of ``layout``.
        topk: experts that count as chosen.
        layout: rows of this context-parallel rank.
        tp_group: ranks that share these rows out, in equal parts.
        cp_group: ranks that hold other rows of the same documents.
    """
    document_T, documents = _documents(layout, group_size(cp_group), scores_TE.device)
    start, stop = own_rows(layout.num_rows, tp_group)
    before = layout.slice_rows(0, start).num_valid_rows
    document_T = document_T[before : before + layout.slice_rows(start, stop).num_valid_rows]
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.detach().topk(topk, dim=-1).indices, 1.0)
    counts_NE = scores_TE.new_zeros(documents, scores_TE.shape[1]).index_add_(0, document_T, chosen_TE)
    for group in (tp_group, cp_group):
        if group is not None and group_size(group) > 1:
            dist.all_reduce(counts_NE, group=group)
    load_NE = counts_NE / counts_NE.sum(dim=-1, keepdim=True).clamp(min=1)  # each row counts K times
    share_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
    return (load_NE[document_T] * share_TE).sum() * scores_TE.shape[1]


# Made outside inference mode: an evaluation may be the first to ask, and training saves them for backward.
@lru_cache(maxsize=_CACHED_VIEWS)
@torch.inference_mode(False)
def valid_row_ids(layout: Layout, device: torch.device) -> Tensor:
    """Int64 ids of the rows that are no padding, ascending; the device is not asked how many there are."""
    order = valid_rows(layout, device).argsort(descending=True, stable=True)
    return order[: layout.num_valid_rows]


@lru_cache(maxsize=_CACHED_VIEWS)
def _documents(layout: Layout, cp_size: int, device: torch.device) -> tuple[Tensor, int]:
    """Number of each valid row's document, and how many numbers there are: rows of one document see one first key."""
    starts, _ = row_bounds(layout, device)
    first_key_T = starts[valid_row_ids(layout, device)].long()
    if cp_size > 1:
        return first_key_T // (2 * cp_size), -(-layout.num_keys // (2 * cp_size))
    document_T = F.pad((first_key_T[1:] != first_key_T[:-1]).long().cumsum(0), (min(len(first_key_T), 1), 0))
    return document_T, len({segment.key_start for segment in layout.segments})
