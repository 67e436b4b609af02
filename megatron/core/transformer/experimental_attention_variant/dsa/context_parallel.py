"""Rows and keys over ranks: which rows of the indexer are this rank's, and the keys that every rank needs.

A context-parallel rank holds zigzag rows of every document. Its tensor-parallel ranks hold other heads of the same
rows, and *share out the indexer's rows*: each scores its own, the selected ids are gathered, and the teacher, which
needs all heads, is summed and scattered back to the rows' owners. So no score and no KL row is computed twice, and
every tensor-parallel rank attends to the same keys.

Keys are few bytes in MLA, so they are gathered whole (over the ranks that share rows, then over context-parallel ranks)
and put into the global order of the keys; a reduce-scatter goes back. The indexer's keys and the latent ones are two
messages, as many bytes as one: scoring needs the small ones alone, so these go first, and the latent keys travel while
the indexer scores. They are waited for right before attention reads them. This is the only file that communicates keys.

Gradients of the indexer's replicated weights are partial on every tensor-parallel rank, whatever the layout of its
input, since each sees its own rows; they are marked to be summed once.

Slices are contiguous, so causal documents give the later ranks more keys to score: ``pairs_by_rank`` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from .backends.protocol import IndexerInputs, TeacherChunk, TopK
from .collectives import (
    RowsInFlight,
    all_gather_rows,
    copy_to_tensor_parallel,
    gather_rows,
    group_size,
    own_rows,
    permute_rows,
    start_gather_rows,
    sum_scatter_rows,
)
from .config import DSAConfig
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

    def require_sizes(self, config: DSAConfig) -> None:
        """Check that the groups are as large as the configuration says.

        Raises:
            ValueError: one of them is not, so heads or rows would be shared out otherwise than the config's gates saw.
        """
        for name, group, size in (
            ("tensor_model_parallel_size", self.tp, config.tensor_model_parallel_size),
            ("context_parallel_size", self.cp, config.context_parallel_size),
        ):
            if group_size(group) != size:
                raise ValueError(
                    f"{name} is {size}, but the module is built with a process group of {group_size(group)}: pass a "
                    f"pg_collection of the configured sizes, or set {name}={group_size(group)}."
                )

    @property
    def cuts(self) -> int:
        """Ranks that share out the rows of ``key``, ``x`` and ``qr``."""
        return group_size(self.tp) if self.sequence_parallel else 1

    def own(self, layout: Layout) -> tuple[int, int]:
        """This rank's rows of the indexer, as a half-open range of ``layout``'s rows."""
        return own_rows(layout.num_rows, self.tp)

    def own_layout(self, layout: Layout) -> Layout:
        """Those rows, over the same keys."""
        return _slice_once(layout, *self.own(layout))

    def own_inputs(self, rows: TokenMajor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's inputs of this rank's own rows, without gradients: x, query latent, positions."""
        start, stop = self.own(context.layout)
        x_TC, q_latent_TR = rows.x_TC.detach(), rows.q_latent_TR.detach()
        if not self.sequence_parallel:
            x_TC, q_latent_TR = x_TC[start:stop], q_latent_TR[start:stop]
        return x_TC, q_latent_TR, context.positions_T[start:stop]

    def gather_keys(
        self, kv_SD: Tensor, indexer: IndexerInputs | None, context: ForwardContext
    ) -> tuple[KeysInFlight, IndexerInputs | None]:
        """All latent keys, still on their way, and the indexer's operands with all keys, in global order."""
        if indexer is not None:
            k_SD = self._start(indexer.k_SD, True, context).wait()
            indexer = IndexerInputs(indexer.q_TID, k_SD, indexer.w_TI)
        if not self.sequence_parallel:
            kv_SD = copy_to_tensor_parallel(kv_SD, self.tp)
        return self._start(kv_SD, self.sequence_parallel, context), indexer

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

    def _start(self, keys_RD: Tensor, own: bool, context: ForwardContext) -> KeysInFlight:
        """Gather the rows of all ranks; ``own`` where ``keys_RD`` is this tensor-parallel rank's share of its rows."""
        sharing = self.tp if own else None
        if group_size(self.cp) == 1:
            return KeysInFlight(start_gather_rows(keys_RD, sharing), context.key_order)
        return KeysInFlight(start_gather_rows(gather_rows(keys_RD, sharing), self.cp), context.key_order)


@dataclass(frozen=True, eq=False)
class KeysInFlight:
    """Keys whose last all-gather has been started, and the order they are to be put into."""

    _rows: RowsInFlight
    _order: tuple[Tensor, Tensor] | None

    def wait(self) -> Tensor:
        """The keys, in global order."""
        gathered_SD = self._rows.wait()
        return gathered_SD if self._order is None else permute_rows(gathered_SD, *self._order)


@lru_cache(maxsize=4)
def _slice_once(layout: Layout, start: int, stop: int) -> Layout:
    """One layout for all layers of a microbatch: views are found sooner by the same object than by an equal one."""
    return layout.slice_rows(start, stop)


def pairs_by_rank(layout: Layout, ranks: int) -> tuple[int, ...]:
    """Visible (row, key) pairs of each tensor-parallel rank's slice of the rows, which are what its indexer scores.

    Raises:
        ValueError: the rows do not split evenly.
    """
    if layout.num_rows % ranks:
        raise ValueError(f"{layout.num_rows} rows do not split over {ranks} ranks: pad them to a multiple of it.")
    share = layout.num_rows // ranks
    slices = (layout.slice_rows(rank * share, (rank + 1) * share) for rank in range(ranks))
    return tuple(
        sum(s.num_rows * s.causal_offset + s.num_rows * (s.num_rows + 1) // 2 for s in part.segments) for part in slices
    )
