"""DSA in plain PyTorch: the specification, and the backend called "none".

Legend: T rows, S keys, H attention heads, I indexer heads, D head width, V value width, K selected keys, N columns of a
target (K or keys).

The functions state the math (score every visible key, keep the K best, attend to those) on dense ``[T, S]`` blocks; the
class below runs them over row chunks that follow the documents, each against the keys that its rows can see, so that
nothing grows with the square of a batch. Forward values are FP32 (FP64 if the operands are), gradients come from
autograd. Keys that no row selects, and rows that select none, are zeroed before the attention reads them, so what they
hold, NaN included, reaches nothing.

KL(target || prediction) has its log-prediction floored at ``LOG_PREDICTION_FLOOR``, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends.protocol import Attended, AttentionInputs, IndexerInputs, QuantizedInputs, TeacherChunk, TopK
from .config import DSAConfig
from .layout import Layout, row_bounds, valid_rows, visible_keys
from .precision import compute_dtype, to_scoring_precision

LOG_PREDICTION_FLOOR = -100.0
_CHUNK_ROWS = 256
_CHUNK_CELLS = 2**26


def score(indexer: IndexerInputs | QuantizedInputs, relu: bool = True) -> Tensor:
    """Index scores ``[T, S]``: ``sum_i w[t,i] * relu(q[t,i] . k[s])``, every key, no mask."""
    if isinstance(indexer, QuantizedInputs):
        return score(indexer.codes(), relu) * indexer.k_SD.scale
    dtype = compute_dtype(indexer.q_TID)
    logits_TIS = torch.einsum("tid,sd->tis", indexer.q_TID.to(dtype), indexer.k_SD.to(dtype))
    logits_TIS = logits_TIS.relu() if relu else logits_TIS
    return torch.einsum("ti,tis->ts", indexer.w_TI.to(dtype), logits_TIS)


def select(scores_TS: Tensor, visible_TS: Tensor, k: int) -> TopK:
    """The ``k`` largest visible scores of each row; ties to the lowest id; ids ascending, then -1."""
    # + 0.0 turns -0.0 into 0.0: the two are equal, and some sorts disagree. A visible -inf must beat the mask's.
    finite_TS = (scores_TS + 0.0).clamp(min=torch.finfo(scores_TS.dtype).min)
    ranked_TS = torch.where(visible_TS, finite_TS, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    length_T, num_keys = visible_TS.sum(-1).clamp(max=k), scores_TS.shape[1]
    past_TK = torch.arange(min(k, num_keys), device=scores_TS.device) >= length_T[:, None]
    ids_TK = ranked_TS[:, :k].masked_fill(past_TK, num_keys).sort(dim=-1).values
    kept_TK = F.pad(scores_TS, (0, 1)).gather(1, ids_TK)
    pad = (0, k - ids_TK.shape[1])
    return TopK(F.pad(ids_TK.masked_fill(past_TK, -1), pad, value=-1).int(), length_T.int(), F.pad(kept_TK, pad))


def selected_mask(indices_TK: Tensor, num_keys: int) -> Tensor:
    """Bool ``[T, S]``: which keys the ids name; -1 names none."""
    mask = torch.zeros(indices_TK.shape[0], num_keys + 1, dtype=torch.bool, device=indices_TK.device)
    ids = indices_TK.long()
    return mask.scatter_(1, ids.masked_fill(ids < 0, num_keys), True)[:, :num_keys]


def attention_logits(attention: AttentionInputs) -> Tensor:
    """Scaled logits ``[T, H, S]``, every key, no mask."""
    dtype = compute_dtype(attention.q_THD)
    return torch.einsum("thd,sd->ths", attention.q_THD.to(dtype), attention.kv_SD.to(dtype)) * attention.scale


def attend(attention: AttentionInputs, chosen_TS: Tensor, value_dim: int) -> Attended:
    """Softmax over the chosen keys; values are their first ``value_dim`` channels."""
    chosen_T1S = chosen_TS.unsqueeze(1)
    empty_T11 = ~chosen_T1S.any(-1, keepdim=True)
    # Keys that no row chose and rows that chose none may hold anything, and 0 * NaN is NaN.
    q_THD = attention.q_THD.masked_fill(empty_T11, 0.0)
    kv_SD = attention.kv_SD.masked_fill(~chosen_TS.any(0)[:, None], 0.0)
    logits_THS = attention_logits(AttentionInputs(q_THD, kv_SD, attention.scale))
    # An empty row keeps its logits, so that its softmax, and thus its gradient, is finite before it is zeroed.
    logits_THS = logits_THS.masked_fill(~(chosen_T1S | empty_T11), -torch.inf)
    weights_THS = logits_THS.softmax(-1) * chosen_T1S
    out_THV = torch.einsum("ths,sv->thv", weights_THS, kv_SD[:, :value_dim].to(weights_THS.dtype))
    lse_TH = logits_THS.detach().logsumexp(-1).masked_fill(empty_T11.squeeze(-1), torch.inf)
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
        for start, stop in _chunks(layout, self.config.n_heads):
            rows = layout.slice_rows(start, stop)
            keys = rows.key_range
            part = select(self._scores(indexer.rows(start, stop), rows, keys), _visible(rows, keys, indexer), k)
            ids = torch.where(part.indices_TK < 0, -1, part.indices_TK + keys[0])
            parts.append(TopK(ids, part.length_T, part.scores_TK))
        return TopK(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def attend(self, attention: AttentionInputs, topk: TopK, layout: Layout) -> Attended:
        parts, attention = [], attention.with_fp32_keys()
        for start, stop in _chunks(layout, attention.q_THD.shape[1]):
            keys = layout.slice_rows(start, stop).key_range
            chosen = selected_mask(_local(topk, (start, stop), keys), keys[1] - keys[0])
            parts.append(attend(_block(attention, (start, stop), keys), chosen, self.config.kv_lora_rank))
        return Attended(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    @torch.no_grad()
    def teacher(
        self, attention: AttentionInputs, attended: Attended, topk: TopK, layout: Layout, dense: bool
    ) -> Iterator[TeacherChunk]:
        ranks = self.config.tensor_model_parallel_size
        assert layout.num_rows % ranks == 0, "rows are padded to a multiple of the tensor-parallel ranks"
        local = layout.num_rows // ranks
        for start, stop in _chunks(layout.slice_rows(0, local), attention.q_THD.shape[1] * ranks):
            slices = [(rank * local + start, rank * local + stop) for rank in range(ranks)]
            ranges = [layout.slice_rows(*rows).key_range for rows in slices]
            if dense:
                keys = min(low for low, _ in ranges), max(high for _, high in ranges)
                parts = [self._dense_target(attention, layout, rows, keys) for rows in slices]
                yield TeacherChunk((start, stop), keys, torch.cat(parts))
            else:
                pairs = zip(slices, ranges, strict=True)
                parts = [self._sparse_target(attention, attended, topk, rows, keys) for rows, keys in pairs]
                yield TeacherChunk((start, stop), None, torch.cat(parts))

    def indexer_loss(
        self, indexer: IndexerInputs, targets: Iterable[TeacherChunk], topk: TopK, layout: Layout, dense: bool
    ) -> Tensor:
        indexer, total = indexer.with_fp32_keys(), indexer.w_TI.new_zeros(())
        for target in targets:
            at = target.rows
            total = total + self._chunk_loss(indexer.rows(*at), target, topk.rows(*at), layout.slice_rows(*at), dense)
        return total

    def _chunk_loss(
        self, indexer: IndexerInputs, target: TeacherChunk, topk: TopK, layout: Layout, dense: bool
    ) -> Tensor:
        keys = layout.key_range if target.keys is None else target.keys
        scores = self._scores(indexer, layout, keys)
        if dense:
            return kl_divergence(target.target_RN, scores, _visible(layout, keys, indexer))
        ids_TK = _local(topk, (0, layout.num_rows), keys)
        return kl_divergence(target.target_RN, _pick(scores, ids_TK), ids_TK >= 0)

    def _scores(self, indexer: IndexerInputs, layout: Layout, keys: tuple[int, int]) -> Tensor:
        """Scores of these rows against ``keys``, rounded as configured."""
        padding_T1 = ~valid_rows(layout, indexer.k_SD.device)[:, None]
        unseen_S1 = ~visible_keys(layout, indexer.k_SD.device)[slice(*keys), None]
        # Padding rows and keys that no row sees may hold anything, and 0 * NaN is NaN in a gradient.
        q_TID = indexer.q_TID.masked_fill(padding_T1[..., None], 0.0)
        k_SD = indexer.k_SD[slice(*keys)].masked_fill(unseen_S1, 0.0)
        block, config = IndexerInputs(q_TID, k_SD, indexer.w_TI.masked_fill(padding_T1, 0.0)), self.config
        rounded = to_scoring_precision(
            block, config.scoring_precision, config.fp8_scale_format, config.fp8_check_finite
        )
        return score(rounded, config.scoring_relu)

    @staticmethod
    def _sparse_target(
        attention: AttentionInputs, attended: Attended, topk: TopK, rows: tuple[int, int], keys: tuple[int, int]
    ) -> Tensor:
        """Probabilities of the selected keys, summed over this rank's heads: ``[rows, K]``."""
        ids_TK = _local(topk, rows, keys)
        logits_THS = attention_logits(_block(attention, rows, keys))
        target_TS = (logits_THS - attended.lse_TH[slice(*rows)].unsqueeze(-1)).exp().sum(1)
        return _pick(target_TS, ids_TK)

    @staticmethod
    def _dense_target(
        attention: AttentionInputs, layout: Layout, rows: tuple[int, int], keys: tuple[int, int]
    ) -> Tensor:
        """Probabilities over all visible keys, summed over this rank's heads: ``[rows, keys]``."""
        visible_T1S = _visible(layout.slice_rows(*rows), keys, attention).unsqueeze(1)
        logits_THS = attention_logits(_block(attention, rows, keys)).masked_fill(~visible_T1S, -torch.inf)
        return logits_THS.softmax(-1).masked_fill(~visible_T1S, 0.0).sum(1)


def _chunks(layout: Layout, heads: int) -> Iterator[tuple[int, int]]:
    """Consecutive row ranges, cut where documents end and wherever a chunk would grow too large."""
    step = max(1, min(_CHUNK_ROWS, _CHUNK_CELLS // max(heads * layout.num_keys, 1)))
    # Padding after a document counts with it.
    stops = [*(segment.row_start for segment in layout.segments[1:]), layout.num_rows]
    start = boundary = 0
    for stop in stops:
        if stop - start > step and boundary > start:
            yield start, boundary
            start = boundary
        while stop - start > step:
            yield start, start + step
            start += step
        boundary = stop
    yield start, layout.num_rows


def _block(attention: AttentionInputs, rows: tuple[int, int], keys: tuple[int, int]) -> AttentionInputs:
    return AttentionInputs(attention.q_THD[slice(*rows)], attention.kv_SD[slice(*keys)], attention.scale)


def _local(topk: TopK, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Selected ids of ``rows``, counted from the first of ``keys``; -1 stays -1."""
    ids_TK = topk.indices_TK[slice(*rows)]
    return torch.where(ids_TK < 0, -1, ids_TK - keys[0])


def _pick(values_TS: Tensor, ids_TK: Tensor) -> Tensor:
    """``values[t, ids[t, k]]``; 0 where the id is -1."""
    return F.pad(values_TS, (1, 0)).gather(1, ids_TK.long() + 1)


def _visible(layout: Layout, keys: tuple[int, int], operands: IndexerInputs | AttentionInputs) -> Tensor:
    """Bool ``[rows, keys]``: which of ``keys`` each row sees."""
    device = operands.k_SD.device if isinstance(operands, IndexerInputs) else operands.kv_SD.device
    starts, ends = row_bounds(layout, device)
    columns = torch.arange(*keys, device=device)
    return (columns >= starts[:, None]) & (columns < ends[:, None])
