"""What a DSA backend is: four verbs over frozen operands.

Legend: T rows (queries), S keys, H attention heads of this rank, I indexer heads, D head width, V value width,
K selected keys a row, R rows of one chunk.

``attention.py`` calls the verbs in one order, ``select -> attend -> teacher -> indexer_loss``, and between the last two
may reduce the target over tensor-parallel ranks. Each verb takes what it needs and a ``Layout`` that says who sees
what; no verb takes flags about packing or parallelism, and none falls back to another backend. Differentiable:
``attend`` in its operands, ``indexer_loss`` in the indexer's. ``select`` and ``teacher`` run without gradients.

Scores are ``I[t,s] = sum_i w[t,i] * relu(q[t,i] . k[s])`` with q and k rounded to the configured scoring precision by
the backend's one scoring function, whatever dtype carried them there; w is FP32 and nothing rounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ..quantization import Quantized

if TYPE_CHECKING:
    from ..config import DSAConfig
    from ..layout import Layout


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class IndexerInputs:
    """Operands of the lightning indexer.

    Attributes:
        q_TID: queries of this call's rows, any floating dtype.
        k_SD: keys of all documents of the call, one key head.
        w_TI: FP32 head weights, already scaled by ``n_heads^-0.5 * head_dim^-0.5``.
    """

    q_TID: Tensor
    k_SD: Tensor
    w_TI: Tensor

    def rows(self, start: int, stop: int) -> IndexerInputs:
        """The same keys, queried by rows ``[start, stop)``."""
        return IndexerInputs(self.q_TID[start:stop], self.k_SD, self.w_TI[start:stop])

    def with_fp32_keys(self) -> IndexerInputs:
        """The same numbers, whose keys add up the gradients of many chunks in FP32 (FP64 keys stay so)."""
        return IndexerInputs(self.q_TID, _at_least_fp32(self.k_SD), self.w_TI)


@dataclass(frozen=True, eq=False)
class QuantizedInputs:
    """Operands of the lightning indexer in FP8, as its kernels score them; they carry no gradients.

    A score is ``k_scale[s] * sum_i w[t,i] * relu(q_code[t,i] . k_code[s])``.

    Attributes:
        q_TID: queries, a scale a head; the scale is in ``w_TI`` already.
        k_SD: keys, a scale a key.
        w_TI: FP32 head weights, scaled as those of ``IndexerInputs`` and multiplied by the queries' scales.
    """

    q_TID: Quantized
    k_SD: Quantized
    w_TI: Tensor

    def codes(self) -> IndexerInputs:
        """The codes as FP32 numbers: operands whose scores lack the keys' scales."""
        return IndexerInputs(self.q_TID.values.float(), self.k_SD.values.float(), self.w_TI)


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Operands of absorbed MLA: every head queries one shared latent key.

    Attributes:
        q_THD: absorbed queries, ``D = kv_lora_rank + qk_pos_emb_head_dim``.
        kv_SD: latent keys; their first ``kv_lora_rank`` channels are the values.
        scale: factor on the logits.
    """

    q_THD: Tensor
    kv_SD: Tensor
    scale: float

    def with_fp32_keys(self) -> AttentionInputs:
        """The same numbers, whose keys add up the gradients of many chunks in FP32 (FP64 keys stay so)."""
        return AttentionInputs(self.q_THD, _at_least_fp32(self.kv_SD), self.scale)

    def detach(self) -> AttentionInputs:
        """The same operands as constants."""
        return AttentionInputs(self.q_THD.detach(), self.kv_SD.detach(), self.scale)


class TopK(NamedTuple):
    """Selected keys of each row.

    Attributes:
        indices_TK: int32 ids, global to the flattened keys, ascending, then -1.
        length_T: int32, ``min(K, visible keys)``; 0 on padding rows.
        scores_TK: FP32 index scores of the ids (anything past the length), or None where they were not kept.
    """

    indices_TK: Tensor
    length_T: Tensor
    scores_TK: Tensor | None

    def rows(self, start: int, stop: int) -> TopK:
        """Rows ``[start, stop)``."""
        scores = None if self.scores_TK is None else self.scores_TK[start:stop]
        return TopK(self.indices_TK[start:stop], self.length_T[start:stop], scores)


class Attended(NamedTuple):
    """Result of sparse attention.

    Attributes:
        out_THV: softmax-weighted values; 0 where a row selects nothing.
        lse_TH: FP32 natural-log sum of exponentials of the scaled logits; +inf where a row selects nothing.
    """

    out_THV: Tensor
    lse_TH: Tensor

    def detach(self) -> Attended:
        """The same result as a constant."""
        return Attended(self.out_THV.detach(), self.lse_TH.detach())


class TeacherChunk(NamedTuple):
    """Un-normalized KL targets of some rows: attention probabilities summed over this rank's heads.

    Attributes:
        rows: half-open range of one tensor-parallel rank's indexer rows.
        keys: half-open range of keys that the columns are (dense loss), or None where they are the selected keys.
        target_RN: FP32 ``[tensor-parallel ranks * rows, K or keys]``, rank 0's rows first. Columns that a row does not
            see hold anything, and ``indexer_loss`` may overwrite it.
    """

    rows: tuple[int, int]
    keys: tuple[int, int] | None
    target_RN: Tensor


class Backend(Protocol):
    """Kernels of DSA. Built once a layer from the checked configuration."""

    def __init__(self, config: DSAConfig) -> None: ...

    @staticmethod
    def unsupported(config: DSAConfig, device: torch.device) -> str | None:
        """Why this backend cannot run ``config`` on ``device`` (option, value, limit, remedy), or None if it can."""
        ...

    def select(self, indexer: IndexerInputs, layout: Layout, k: int) -> TopK:
        """The ``k`` best-scored visible keys of each row; ties go to the lowest id.

        Scores may be left out where no loss will read them.
        """
        ...

    def attend(self, attention: AttentionInputs, topk: TopK, layout: Layout) -> Attended:
        """Softmax attention over the selected keys."""
        ...

    def teacher(
        self, attention: AttentionInputs, attended: Attended, topk: TopK, layout: Layout, dense: bool
    ) -> Iterator[TeacherChunk]:
        """Targets of all rows, in chunks that hold equally many rows of each tensor-parallel rank."""
        ...

    def indexer_loss(
        self, indexer: IndexerInputs, targets: Iterable[TeacherChunk], topk: TopK, layout: Layout, dense: bool
    ) -> Tensor:
        """FP32 scalar: KL(target || prediction) summed over the targets' rows, differentiable in ``indexer``.

        ``indexer``, ``topk`` and ``layout`` are those of one rank's own rows, which the targets' ``rows`` count, and
        the targets are summed over all heads. They come one at a time and are read once, since a dense one is as wide
        as the keys. The loss reaches ``indexer`` also where no row is valid: other ranks await its gradients. Its value
        may be left out where the pass will be recomputed (``loss.recomputed_later``), and the targets unread.
        """
        ...
