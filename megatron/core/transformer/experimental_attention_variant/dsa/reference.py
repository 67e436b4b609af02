"""DSA in plain PyTorch: the specification, and the backend called "none".

Legend: T rows, S keys, H attention heads, I indexer heads, D head width, V value width, K selected keys, N columns of a
target (K or keys).

The functions state the math (DESIGN of a row: score every visible key, keep the K best, attend to those); the class
below
runs them over row chunks, so that memory stays linear in the length. Forward values are FP32 (FP64 if the operands
are),
gradients come from autograd. Only selected keys are read by the attention, so what unselected keys hold, NaN included,
reaches nothing.

KL(target || prediction) has its log-prediction floored at ``LOG_PREDICTION_FLOOR``, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends.protocol import Attended, AttentionInputs, IndexerInputs, TeacherChunk, TopK
from .config import DSAConfig
from .layout import Layout, row_bounds, visible_keys
from .precision import compute_dtype, to_scoring_precision

LOG_PREDICTION_FLOOR = -100.0
_CHUNK_CELLS = 2**24


def score(indexer: IndexerInputs, relu: bool = True) -> Tensor:
    """Index scores ``[T, S]``: ``sum_i w[t,i] * relu(q[t,i] . k[s])``, every key, no mask."""
    dtype = compute_dtype(indexer.q_TID)
    logits_TIS = torch.einsum("tid,sd->tis", indexer.q_TID.to(dtype), indexer.k_SD.to(dtype))
    logits_TIS = logits_TIS.relu() if relu else logits_TIS
    return torch.einsum("ti,tis->ts", indexer.w_TI.to(dtype), logits_TIS)


def score_selected(indexer: IndexerInputs, indices_TK: Tensor, relu: bool = True) -> Tensor:
    """Index scores ``[T, K]`` of the given keys alone (anything where the id is -1)."""
    dtype = compute_dtype(indexer.q_TID)
    k_TKD = gather_keys(indexer.k_SD.to(dtype), indices_TK)
    logits_TIK = torch.einsum("tid,tkd->tik", indexer.q_TID.to(dtype), k_TKD)
    logits_TIK = logits_TIK.relu() if relu else logits_TIK
    return torch.einsum("ti,tik->tk", indexer.w_TI.to(dtype), logits_TIK)


def select(scores_TS: Tensor, starts_T: Tensor, ends_T: Tensor, k: int) -> TopK:
    """The ``k`` largest scores in columns ``[start, end)`` of a row; ties to the lowest id; ids ascending, then -1."""
    columns = torch.arange(scores_TS.shape[1], device=scores_TS.device)
    visible_TS = (columns >= starts_T[:, None]) & (columns < ends_T[:, None])
    # + 0.0 turns -0.0 into 0.0: the two are equal, and some sorts disagree.
    ranked_TS = torch.where(visible_TS, scores_TS + 0.0, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    length_T = (ends_T - starts_T).clamp(max=k)
    kept = ranked_TS[:, :k]
    past = torch.arange(kept.shape[1], device=kept.device) >= length_T[:, None]
    kept = kept.masked_fill(past, scores_TS.shape[1]).sort(-1).values
    scores_TK = scores_TS.gather(1, kept.clamp(max=max(scores_TS.shape[1] - 1, 0))) if kept.numel() else kept.float()
    kept = kept.masked_fill(past, -1)
    pad = (0, k - kept.shape[1])
    return TopK(F.pad(kept, pad, value=-1).int(), length_T.int(), F.pad(scores_TK, pad))


def gather_keys(keys_SD: Tensor, indices_TK: Tensor) -> Tensor:
    """``keys[indices]`` as ``[T, K, D]``, zeros where the id is -1."""
    rows = F.embedding(indices_TK.long().clamp(min=0), keys_SD)
    return rows.masked_fill((indices_TK < 0).unsqueeze(-1), 0.0)


def logits_selected(attention: AttentionInputs, keys_TKD: Tensor) -> Tensor:
    """Scaled attention logits ``[T, H, K]`` over gathered keys."""
    return torch.einsum("thd,tkd->thk", attention.q_THD.to(keys_TKD.dtype), keys_TKD) * attention.scale


def attend(attention: AttentionInputs, indices_TK: Tensor, value_dim: int) -> Attended:
    """Softmax over the selected keys; values are their first ``value_dim`` channels."""
    keys_TKD = gather_keys(attention.kv_SD.to(compute_dtype(attention.q_THD)), indices_TK)
    chosen_T1K = (indices_TK >= 0).unsqueeze(1)
    empty_T11 = ~chosen_T1K.any(-1, keepdim=True)
    # An empty row keeps its zero logits, so that its softmax, and thus its gradient, is finite before it is zeroed.
    logits_THK = logits_selected(attention, keys_TKD).masked_fill(~(chosen_T1K | empty_T11), -torch.inf)
    weights_THK = logits_THK.softmax(-1) * chosen_T1K
    out_THV = torch.einsum("thk,tkv->thv", weights_THK, keys_TKD[..., :value_dim])
    lse_TH = logits_THK.detach().logsumexp(-1).masked_fill(empty_T11.squeeze(-1), torch.inf)
    return Attended(out_THV.to(attention.q_THD.dtype), lse_TH)


def kl_divergence(target_TN: Tensor, scores_TN: Tensor, mask_TN: Tensor) -> Tensor:
    """``sum_t KL(target_t / |target_t| || softmax(scores_t))`` over the masked-in columns; rows without any add 0."""
    empty_T1 = ~mask_TN.any(-1, keepdim=True)
    log_prediction = scores_TN.masked_fill(~(mask_TN | empty_T1), -torch.inf).log_softmax(-1)
    log_prediction = log_prediction.clamp(min=LOG_PREDICTION_FLOOR)
    p_TN = target_TN.masked_fill(~mask_TN, 0.0)
    p_TN = p_TN / p_TN.sum(-1, keepdim=True).clamp(min=torch.finfo(p_TN.dtype).tiny)
    return (torch.xlogy(p_TN, p_TN) - p_TN * log_prediction.masked_fill(~mask_TN, 0.0)).sum()


class ReferenceBackend:
    """The functions above, over row chunks (see ``backends/protocol.py`` for the verbs)."""

    def __init__(self, config: DSAConfig) -> None:
        self.config = config

    @staticmethod
    def unsupported(config: DSAConfig, device: torch.device) -> str | None:
        """Nothing: whatever passes the gates of ``DSAConfig`` runs anywhere."""
        return None

    @torch.no_grad()
    def select(self, indexer: IndexerInputs, layout: Layout, k: int) -> TopK:
        parts = []
        for start, stop in self._chunks(layout.num_rows, layout.num_keys * self.config.n_heads):
            rows = layout.slice_rows(start, stop)
            scores, (starts, ends), first = self._scores(indexer.rows(start, stop), rows)
            part = select(scores, starts - first, ends - first, k)
            ids = part.indices_TK + first
            parts.append(part._replace(indices_TK=ids.masked_fill(part.indices_TK < 0, -1)))
        return TopK(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def attend(self, attention: AttentionInputs, topk: TopK) -> Attended:
        topk, parts = _trim(topk, attention.kv_SD.shape[0]), []
        for start, stop in self._chunks(topk.indices_TK.shape[0], self._selected_cells(attention, topk)):
            chunk = AttentionInputs(attention.q_THD[start:stop], attention.kv_SD, attention.scale)
            parts.append(attend(chunk, topk.indices_TK[start:stop], self.config.kv_lora_rank))
        return Attended(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    @torch.no_grad()
    def teacher(
        self, attention: AttentionInputs, attended: Attended, topk: TopK, layout: Layout, dense: bool
    ) -> Iterator[TeacherChunk]:
        ranks = self.config.tensor_model_parallel_size
        local = layout.num_rows // ranks
        cells = attention.q_THD.shape[1] * layout.num_keys if dense else self._selected_cells(attention, topk)
        for start, stop in self._chunks(local, ranks * cells):
            slices = [(rank * local + start, rank * local + stop) for rank in range(ranks)]
            keys = _union([layout.slice_rows(*rows).key_range for rows in slices]) if dense else None
            parts = [self._target(attention, attended, topk, layout, rows, keys) for rows in slices]
            yield TeacherChunk((start, stop), keys, torch.cat(parts))

    def indexer_loss(
        self, indexer: IndexerInputs, target: TeacherChunk, topk: TopK, layout: Layout, dense: bool
    ) -> Tensor:
        if not dense:
            indices_TK = _trim(topk, indexer.k_SD.shape[0]).indices_TK
            rounded = to_scoring_precision(indexer, self.config.scoring_precision)
            scores = score_selected(rounded, indices_TK, self.config.scoring_relu)
            return kl_divergence(target.target_RN[:, : indices_TK.shape[1]], scores, indices_TK >= 0)
        assert target.keys is not None
        scores, (starts, ends), first = self._scores(indexer, layout, target.keys)
        columns = torch.arange(first, first + scores.shape[1], device=scores.device)
        visible = (columns >= starts[:, None]) & (columns < ends[:, None])
        return kl_divergence(target.target_RN, scores, visible)

    def _scores(
        self, indexer: IndexerInputs, layout: Layout, keys: tuple[int, int] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor], int]:
        """Scores of these rows against the keys that any of them can see, the rows' bounds, and the first key."""
        first, last = keys or layout.key_range
        k_SD = indexer.k_SD[first:last]
        # Keys of padding may hold anything, and 0 * NaN is NaN in a gradient.
        k_SD = k_SD.masked_fill(~visible_keys(layout, k_SD.device)[first:last, None], 0.0)
        rounded = to_scoring_precision(IndexerInputs(indexer.q_TID, k_SD, indexer.w_TI), self.config.scoring_precision)
        return score(rounded, self.config.scoring_relu), row_bounds(layout, k_SD.device), first

    def _target(
        self,
        attention: AttentionInputs,
        attended: Attended,
        topk: TopK,
        layout: Layout,
        rows: tuple[int, int],
        keys: tuple[int, int] | None,
    ) -> Tensor:
        """Attention probabilities of ``rows``, summed over this rank's heads, over ``keys`` or the selected keys."""
        start, stop = rows
        chunk = AttentionInputs(attention.q_THD[start:stop], attention.kv_SD, attention.scale)
        kv_SD = attention.kv_SD.to(compute_dtype(attention.q_THD))
        if keys is None:
            indices_TK = _trim(topk.rows(start, stop), kv_SD.shape[0]).indices_TK
            logits = logits_selected(chunk, gather_keys(kv_SD, indices_TK))
            probabilities = (logits - attended.lse_TH[start:stop].unsqueeze(-1)).exp()
            target = probabilities.masked_fill((indices_TK < 0).unsqueeze(1), 0.0).sum(1)
            return F.pad(target, (0, topk.indices_TK.shape[1] - target.shape[1]))
        starts, ends = row_bounds(layout.slice_rows(start, stop), kv_SD.device)
        columns = torch.arange(*keys, device=kv_SD.device)
        visible = ((columns >= starts[:, None]) & (columns < ends[:, None])).unsqueeze(1)
        logits = torch.einsum("thd,sd->ths", chunk.q_THD.to(kv_SD.dtype), kv_SD[slice(*keys)]) * attention.scale
        return logits.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0).sum(1)

    @staticmethod
    def _selected_cells(attention: AttentionInputs, topk: TopK) -> int:
        _, heads, width = attention.q_THD.shape
        return topk.indices_TK.shape[1] * (heads + width)

    @staticmethod
    def _chunks(rows: int, cells_a_row: int) -> Iterator[tuple[int, int]]:
        step = max(1, _CHUNK_CELLS // max(cells_a_row, 1))
        for start in range(0, max(rows, 1), step):
            yield start, min(start + step, rows)


def _trim(topk: TopK, num_keys: int) -> TopK:
    """Without the columns that ``num_keys`` keys can never fill."""
    return topk._replace(indices_TK=topk.indices_TK[:, :num_keys])


def _union(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    return min(low for low, _ in ranges), max(high for _, high in ranges)
