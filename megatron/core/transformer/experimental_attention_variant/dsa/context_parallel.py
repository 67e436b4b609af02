"""Rows and keys over ranks: which rows of the indexer are this rank's, and the keys that every rank needs.

A context-parallel rank holds zigzag rows of every document. Its tensor-parallel ranks hold other heads of the same
rows, and *share out the indexer's rows*: each scores its own, the selected ids are gathered, and the teacher, which
needs all heads, is summed and scattered back to the rows' owners. So no score and no KL row is computed twice, and
every tensor-parallel rank attends to the same keys.

Keys are few bytes in MLA, so they are gathered whole: one all-gather of ``[kv | indexer key]`` a layer (over the ranks
that share rows under sequence parallelism, then over context-parallel ranks), put into the global order of the keys,
and a reduce-scatter in backward. This is the only file that communicates keys.

Gradients of the indexer's replicated weights are partial on every tensor-parallel rank, whatever the layout of its
input, since each sees its own rows; they are marked to be summed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .backends.protocol import IndexerInputs, TeacherChunk, TopK
from .collectives import all_gather_rows, copy_to_tensor_parallel, gather_rows, group_size, own_rows, sum_scatter_rows
from .context import ForwardContext, TokenMajor
from .layout import Layout


@dataclass(frozen=True, eq=False)
class RowShards:
    """How one layer's rows lie over ranks. ``RowShards(None, None, False)`` is a single process.

    Attributes:
        tp: ranks that hold other heads of the same rows.
        cp: ranks that hold other rows of the same documents.
        sequence_parallel: whether ``key``, ``x`` and ``qr`` come as this tensor-parallel rank's own rows.
    """

    tp: Any = None
    cp: Any = None
    sequence_parallel: bool = False

    @classmethod
    def of(cls, pg_collection: Any, sequence_parallel: bool) -> RowShards:
        """From Megatron's process group collection (None in one process)."""
        return cls(getattr(pg_collection, "tp", None), getattr(pg_collection, "cp", None), sequence_parallel)

    def own(self, layout: Layout) -> tuple[int, int]:
        """This rank's rows of the indexer, as a half-open range of ``layout``'s rows."""
        return own_rows(layout.num_rows, self.tp)

    def own_inputs(self, rows: TokenMajor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's inputs of this rank's own rows, without gradients: x, query latent, positions."""
        start, stop = self.own(context.layout)
        x_TC, q_latent_TR = rows.x_TC.detach(), rows.q_latent_TR.detach()
        if not self.sequence_parallel:
            x_TC, q_latent_TR = x_TC[start:stop], q_latent_TR[start:stop]
        return x_TC, q_latent_TR, context.positions_T[start:stop]

    def gather_keys(
        self, kv_SD: Tensor, indexer: IndexerInputs | None, context: ForwardContext
    ) -> tuple[Tensor, IndexerInputs | None]:
        """All latent keys, and the indexer's operands with all keys, in global order."""
        if not self.sequence_parallel:
            kv_SD = copy_to_tensor_parallel(kv_SD, self.tp)
        if group_size(self.tp) * group_size(self.cp) == 1:
            return kv_SD, indexer
        if indexer is None:
            return self._gather(kv_SD, self.sequence_parallel, context), None
        k_SD = indexer.k_SD
        if self.sequence_parallel and k_SD.dtype == kv_SD.dtype:
            widths = (kv_SD.shape[1], k_SD.shape[1])
            kv_SD, k_SD = self._gather(torch.cat((kv_SD, k_SD), dim=1), True, context).split(widths, dim=1)
        else:
            kv_SD, k_SD = self._gather(kv_SD, self.sequence_parallel, context), self._gather(k_SD, True, context)
        return kv_SD, IndexerInputs(indexer.q_TID, k_SD, indexer.w_TI)

    def gather_topk(self, topk: TopK) -> TopK:
        """The selections of all tensor-parallel ranks' rows, without scores; ``topk`` itself in one process."""
        if group_size(self.tp) == 1:
            return topk
        return TopK(all_gather_rows(topk.indices_TK, self.tp), all_gather_rows(topk.length_T, self.tp), None)

    def reduce_target(self, chunk: TeacherChunk) -> TeacherChunk:
        """The target of this rank's rows of a chunk, summed over all heads."""
        return chunk._replace(target_RN=sum_scatter_rows(chunk.target_RN, self.tp))

    def mark_partial_gradients(self, indexer: nn.Module) -> None:
        """Mark the indexer's weights: their gradients are to be summed over tensor-parallel ranks, once."""
        if group_size(self.tp) > 1:
            for parameter in indexer.parameters():
                parameter.tensor_parallel_grad = "sum"  # type: ignore[attr-defined]

    def _gather(self, keys_RD: Tensor, own: bool, context: ForwardContext) -> Tensor:
        """Rows of all ranks in global key order; ``own`` where ``keys_RD`` is this tensor-parallel rank's share."""
        if own:
            keys_RD = gather_rows(keys_RD, self.tp)
        gathered_SD = gather_rows(keys_RD, self.cp)
        return gathered_SD if context.key_order is None else _permute(gathered_SD, *context.key_order)


def _permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse, without a scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None
