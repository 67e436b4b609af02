"""The sequence-level balance loss of DeepSeek-V3 (section 2.1.2, equations 17 to 20), and what it is scaled by.

For one document of ``t`` rows, ``L = sum_e f_e P_e``: ``f_e`` is ``E / (K t)`` times the rows that have e among their K
best scores, ``P_e`` the mean of the rows' scores, normalized to sum to 1. The ranking is of plain scores: neither the
expert bias nor groups take part, as in the paper and in Megatron-LM.

Scaling follows the indexer's KL loss: a document's ``L`` counts once a row, and what is back-propagated is
``moe_aux_loss_coeff * grad_scale * (sum over documents of t * L) / normalizer``. So it follows the main loss through
microbatches, gradient accumulation and loss scaling, and where the normalizer is global it does not depend on how
documents are spread over microbatches. With documents of one length and the default normalizer it is Megatron-LM's
mean over the sequences of a microbatch.

Shape legend: T rows, E experts, K experts chosen, N documents.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds, valid_rows

_CACHED_VIEWS = 64


def sequence_balance_loss(scores_TE: Tensor, topk: int, layout: Layout) -> Tensor:
    """Sum over documents of rows times balance loss, an FP32 scalar; ``scores_TE`` are those of the valid rows."""
    num_experts = scores_TE.shape[1]
    document_T, lengths_N = _documents(layout, scores_TE.device)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.detach().topk(topk, dim=-1).indices, 1.0)
    share_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + 1e-20)
    sums = scores_TE.new_zeros(2, len(lengths_N), num_experts)
    counts_NE = sums[0].index_add(0, document_T, chosen_TE)
    shares_NE = sums[1].index_add(0, document_T, share_TE)
    return (counts_NE * shares_NE / lengths_N[:, None]).sum() * (num_experts / topk)


@lru_cache(maxsize=_CACHED_VIEWS)
def valid_row_ids(layout: Layout, device: torch.device) -> Tensor:
    """Int64 ids of the rows that are no padding, ascending; the device is not asked how many there are."""
    order = valid_rows(layout, device).argsort(descending=True, stable=True)
    return order[: layout.num_valid_rows]


@lru_cache(maxsize=_CACHED_VIEWS)
def _documents(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Document of each valid row, and rows of each document: rows of one document see the same first key."""
    starts, _ = row_bounds(layout, device)
    first_key_T = starts[valid_row_ids(layout, device)]
    document_T = F.pad((first_key_T[1:] != first_key_T[:-1]).long().cumsum(0), (min(len(first_key_T), 1), 0))
    documents = len({segment.key_start for segment in layout.segments})
    lengths_N = torch.zeros(documents, dtype=torch.int64, device=device)
    return document_T, lengths_N.index_add_(0, document_T, torch.ones_like(document_T))
