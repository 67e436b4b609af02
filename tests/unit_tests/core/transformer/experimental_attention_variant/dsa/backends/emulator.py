"""The third-party surface of the cudnn backend in plain PyTorch, as strict about its inputs as the kernels are.

``install`` puts a ``cudnn`` and a ``flash_mla`` module (and stand-ins for the two Triton files) where the backend
imports them, so that CPU runs go through every line of the wiring. Reproduced on purpose, each measured or read in
the sources:

- what each wrapper refuses: dtypes, ranks, head counts and widths, 16-byte alignment, contiguity, int32 lengths;
- scoring with 32 heads shows a few rows future keys (a tile holds 4 rows, and only its rightmost 64-key block is
  masked);
- a row's top-k goes by its length, never by -inf; ids ascend, then -1, and values end in -inf;
- FlashMLA gives an empty row output 0 and lse +inf;
- both indexer backwards divide by the rows of the call and overwrite score matrices, and weight gradients are BF16;
- the sparse target comes normalized, and refuses a single row.

FlashMLA comes in the builds of ``FLASH_BUILDS``, which differ as its releases do.

``Emulator.calls`` counts launches, ``Emulator.compiled`` holds the keys by which the library caches compiled kernels,
and ``Emulator.handed`` the addresses of what the attention kernels got last.
The same suite runs against the real kernels on a GPU, which is what proves this file.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from importlib import import_module
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

CUDNN_BACKEND = "megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn"
ALIGN_BYTES = 16
CLIP = -100.0
EPS = 1e-10


class Refused(Exception):
    """What a kernel's own check would have raised."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Refused(text)


def check_tensor(name: str, x: Tensor, dtypes: Any, ndim: int, contiguous: bool = True) -> None:
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    require(x.dtype in dtypes, f"{name} must be one of {dtypes}, got {x.dtype}")
    require(x.ndim == ndim, f"{name} must have {ndim} dimensions, got {tuple(x.shape)}")
    require(not x.requires_grad, f"{name} must be detached")
    require(x.numel() == 0 or x.stride(-1) == 1 or x.shape[-1] == 1, f"{name} needs a unit innermost stride")
    require(not contiguous or x.is_contiguous(), f"{name} must be contiguous, got strides {x.stride()}")
    require(x.data_ptr() % ALIGN_BYTES == 0, f"{name} must be {ALIGN_BYTES}-byte aligned")


BF16, FP32, FP8, INT32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32


class Emulator:
    """The wrappers that the backend calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.compiled: set[tuple[Any, ...]] = set()
        self.score_cells: list[tuple[int, int]] = []
        self.handed: dict[str, dict[str, int]] = {}

    def _note(self, name: str, *key: Any) -> None:
        self.calls[name] += 1
        self.compiled.add((name, *key))

    def indexer_forward_wrapper(  # noqa: PLR0913
        self,
        q,
        k,
        w,
        ratio=4,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        q_causal_offsets,
        precision="bf16",
        q_scale=None,
        k_scale=None,
    ):
        require(precision in ("bf16", "fp8"), f"precision must be 'bf16' or 'fp8', got {precision!r}")
        fp8 = precision == "fp8"
        check_tensor("q", q, FP8 if fp8 else BF16, 3)
        check_tensor("k", k, FP8 if fp8 else BF16, 3)
        check_tensor("w", w, (BF16, FP32), 2)
        heads = q.shape[1]
        if fp8:
            require(heads in (32, 64), "FP8 scoring takes 32 or 64 heads")
            check_tensor("q_scale", q_scale, FP32, 2)
            check_tensor("k_scale", k_scale, FP32, 2)
            require(q_scale.shape == q.shape[:2] and k_scale.shape == k.shape[:2], "one scale a head and a key")
        else:
            require(q_scale is None and k_scale is None, "scales are only valid with precision='fp8'")
        require(ratio == 1, "only ratio 1 is emulated")
        require(heads in (16, 32, 64) and q.shape[2] == k.shape[2] == 128 and k.shape[1] == 1, "heads or head_dim")
        require(w.shape == q.shape[:2], "w must be [rows, heads]")
        for name, x in (("cu_q", cu_seqlens_q), ("cu_k", cu_seqlens_k), ("offsets", q_causal_offsets)):
            check_tensor(name, x, INT32, 1)
        segments = cu_seqlens_q.numel() - 1
        require(0 < segments <= 65535, "the grid holds 65535 segments")
        require(cu_seqlens_k.numel() == segments + 1 and q_causal_offsets.numel() == segments, "segment vectors differ")
        cu_q, cu_k, offsets = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), q_causal_offsets.tolist()
        require(cu_q[0] == 0 and cu_q[-1] == q.shape[0] and cu_k[0] == 0 and cu_k[-1] <= k.shape[0], "offsets")
        require(max(b - a for a, b in zip(cu_q, cu_q[1:], strict=False)) <= max_seqlen_q, "max_seqlen_q")
        require(max(b - a for a, b in zip(cu_k, cu_k[1:], strict=False)) <= max_seqlen_k, "max_seqlen_k")
        self._note("indexer_forward", q.dtype, w.dtype, heads)
        self.score_cells.append((q.shape[0], max_seqlen_k))
        scores = torch.full((q.shape[0], max_seqlen_k), -torch.inf)
        for i, offset in enumerate(offsets):
            rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            # FP32 weights are the caller's word that they hold q_scale; BF16 ones are multiplied here.
            weights = w[rows].float() * q_scale[rows] if fp8 and w.dtype == BF16 else w[rows]
            part = index_scores(q[rows], k[keys, 0], weights)
            part = part * k_scale[keys, 0] if fp8 else part
            shown = shown_keys(part.shape[0], part.shape[1], offset, heads)
            scores[rows, : part.shape[1]] = part.masked_fill(~shown, -torch.inf)
        return {"scores": scores}

    def indexer_top_k_wrapper(self, values, lengths, top_k, return_val=True, deterministic=False):
        check_tensor("input_values", values, (FP32, BF16), 2)
        check_tensor("seq_lens", lengths, INT32, 1)
        rows, columns = values.shape
        require(0 < top_k <= 2048, f"top_k must be in (0, 2048], got {top_k}")
        require(rows > 0 and columns > 0 and lengths.numel() == rows, "rows, columns or lengths")
        require(deterministic, "the backend asks for deterministic selection")
        require(int(lengths.max()) <= columns and int(lengths.min()) >= 0, "lengths outside the columns")
        bucket = 1 << (columns - 1).bit_length()
        self._note("indexer_top_k", values.dtype, bucket, top_k, return_val, rows > 148)
        inside = torch.arange(columns) < lengths[:, None]
        keys = ordered_bits(torch.where(inside, values, -torch.inf).float())
        # Rows of -inf still give `length` ids: rank what is inside a row before what is not.
        ranked = keys.sort(dim=-1, descending=True, stable=True).indices
        inside_ranked = inside.gather(1, ranked)
        ranked = ranked.gather(1, inside_ranked.int().sort(dim=-1, descending=True, stable=True).indices)[:, :top_k]
        taken = torch.arange(ranked.shape[1]) < lengths[:, None]
        ids = ranked.masked_fill(~taken, columns).sort(-1).values
        found = torch.full((rows, top_k), -1, dtype=INT32)
        found[:, : ids.shape[1]] = ids.masked_fill(~taken, -1).int()
        best = values.gather(1, found.clamp(min=0).long()).masked_fill(found < 0, -torch.inf)
        return {"indices": found, "values": best if return_val else None}

    def flash_mla_sparse_fwd(  # noqa: PLR0913
        self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False
    ):
        require(use_legacy, "sparse_prefill_fwd is only supported on SM100f architectures.")
        return self._sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    def upstream_sparse_fwd(  # noqa: PLR0913
        self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None
    ):
        return self._sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    def base2_sparse_fwd(  # noqa: PLR0913
        self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None
    ):
        out, peak, lse = self._sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
        return out, peak, lse / math.log(2.0)

    def sm100_sparse_fwd(  # noqa: PLR0913
        self, q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None
    ):
        raise Refused("sparse_prefill_fwd is only supported on SM100f architectures.")

    def lengthless_sparse_fwd(self, q, kv, indices, sm_scale, d_v=512):
        raise AssertionError("not called: its rows have no lengths")

    def _sparse_prefill(self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):  # noqa: PLR0913
        check_tensor("q", q, BF16, 3)
        check_tensor("kv", kv, BF16, 3)
        check_tensor("indices", indices, INT32, 3)
        require(q.shape[0] > 0, "no rows")
        require(q.shape[1] in (64, 128), f"h_q must be 64 or 128, got {q.shape[1]}")
        require(q.shape[2] == kv.shape[2] and q.shape[2] in (512, 576) and d_v == 512, "d_qk or d_v")
        require(indices.shape[2] % 128 == 0, f"topk must be a multiple of 128, got {indices.shape[2]}")
        require(indices.shape[:2] == (q.shape[0], 1) and attn_sink is None, "indices or sink")
        require(topk_length.dtype == INT32 and topk_length.shape == q.shape[:1], "topk_length")
        self._note("flash_mla", q.shape[1], q.shape[2])
        self.handed["flash_mla"] = addresses(q=q, kv=kv)
        logits, chosen, keys = selected_logits(q, kv[:, 0], indices[:, 0], topk_length, sm_scale)
        lse = logits.logsumexp(-1)
        weights = (logits - lse.unsqueeze(-1)).exp().masked_fill(~chosen.unsqueeze(1), 0.0)
        out = torch.einsum("thk,tkv->thv", weights, keys[..., :d_v])
        empty = ~chosen.any(-1)
        lse = lse.masked_fill(empty[:, None], torch.inf)
        return out.to(BF16), logits.amax(-1), lse

    def sparse_attention_backward_wrapper(  # noqa: PLR0913
        self, q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None
    ):
        for name, x, dtype, ndim in (
            ("q", q, BF16, 3), ("kv", kv, BF16, 2), ("out", out, BF16, 3), ("dout", dout, BF16, 3),
            ("lse", lse, FP32, 2), ("attn_sink", attn_sink, FP32, 1), ("topk_idxs", topk_idxs, INT32, 2),
            ("topk_length", topk_length, INT32, 1),
        ):  # fmt: skip
            check_tensor(name, x, dtype, ndim)
        rows, heads, width = q.shape
        require(rows > 0, "no rows")
        require(heads in (16, 32, 64, 128) and width in (512, 576), f"heads {heads} or width {width}")
        require(out.shape == dout.shape == (rows, heads, 512) and lse.shape == (rows, heads), "out, dout or lse")
        require(attn_sink.shape == (heads,) and topk_idxs.shape[0] == rows and topk_length.shape == (rows,), "shapes")
        self._note("sparse_backward", heads, width, topk_idxs.shape[1])
        self.handed["sparse_backward"] = addresses(q=q, kv=kv, out=out, dout=dout, lse=lse)
        logits, chosen, keys = selected_logits(q, kv, topk_idxs, topk_length, softmax_scale)
        weights = (logits - lse.unsqueeze(-1)).exp().masked_fill(~chosen.unsqueeze(1), 0.0)
        dout, delta = dout.float(), (out.float() * dout.float()).sum(-1, keepdim=True)
        dweights = torch.einsum("thv,tkv->thk", dout, keys[..., :512])
        dlogits = weights * (dweights - delta) * softmax_scale
        dq = torch.einsum("thk,tkd->thd", dlogits, keys)
        dkeys = torch.einsum("thk,thd->tkd", dlogits, q.float())
        dkeys[..., :512] += torch.einsum("thk,thv->tkv", weights, dout)
        dkv = torch.zeros(kv.shape).index_add_(0, topk_idxs[chosen].long(), dkeys[chosen])
        return {"dq": dq.to(BF16), "dkv": dkv.to(BF16), "d_sink": torch.zeros(heads)}

    def sparse_attn_score_recompute_wrapper(self, q, k, lse, topk_indices, softmax_scale, topk_length=None):
        check_tensor("q", q, BF16, 4)
        check_tensor("k", k, BF16, 3)
        check_tensor("lse", lse, FP32, 3)
        check_tensor("topk_indices", topk_indices, INT32, 3)
        check_tensor("topk_length", topk_length, INT32, 2)
        batch, rows, heads, _ = q.shape
        require(batch == 1 and heads in (16, 32, 48, 64, 96, 128), f"batch {batch} or heads {heads}")
        require(rows > 1, "a single row's transposed lse has no unit stride")
        require(topk_indices.shape[2] % 128 == 0, "topk must be a multiple of 128")
        require(lse.shape == (1, rows, heads) and topk_length.shape == (1, rows), "lse or topk_length")
        self._note("sparse_target", heads, topk_indices.shape[2], softmax_scale)
        logits, chosen, _ = selected_logits(q[0], k[0], topk_indices[0], topk_length[0], softmax_scale)
        target = (logits - lse[0].unsqueeze(-1)).exp().masked_fill(~chosen.unsqueeze(1), 0.0).sum(1)
        return {"target": (target / (target.sum(-1, keepdim=True) + EPS)).unsqueeze(0)}

    def dense_attn_score_recompute_wrapper(self, q, k, lse, softmax_scale, ratio=1, q_causal_offsets=None):
        check_tensor("q", q, BF16, 4)
        check_tensor("k", k, BF16, 4)
        check_tensor("lse", lse, FP32, 3)
        check_tensor("q_causal_offsets", q_causal_offsets, INT32, 1)
        batch, rows, heads, _ = q.shape
        require(batch == 1 and heads > 1 and heads % min(heads, 64) == 0 and k.shape[2] == 1 and ratio == 1, "heads")
        require(lse.shape == (1, rows, heads) and q_causal_offsets.shape == (1,), "lse or offsets")
        self._note("dense_target", heads, softmax_scale)
        logits = torch.einsum("thd,sd->ths", q[0].float(), k[0, :, 0].float()) * softmax_scale
        shown = shown_keys(rows, k.shape[1], int(q_causal_offsets), 1)
        out = (logits - lse[0].unsqueeze(-1)).exp().sum(1).masked_fill(~shown, -torch.inf)
        return {"out": out.unsqueeze(0), "denom": out.masked_fill(~shown, 0.0).sum(-1).unsqueeze(0)}

    def indexer_backward_wrapper(  # noqa: PLR0913
        self, q, w, k, attn_score, index_score, topk_indices, grad_loss, loss_coeff=1.0, d_index_k=None
    ):
        self._check_indexer_backward(q, w, k, grad_loss, d_index_k)
        for name, x, dtype in (
            ("target", attn_score, FP32),
            ("predict", index_score, FP32),
            ("ids", topk_indices, INT32),
        ):
            check_tensor(name, x, dtype, 3)
            require(x.shape == (1, q.shape[1], topk_indices.shape[2]), f"{name} shape {tuple(x.shape)}")
        require(topk_indices.shape[2] % 128 == 0, "topk must be a multiple of 128")
        self._note("indexer_backward", q.shape[2], topk_indices.shape[2])
        keep = index_score[0] >= torch.tensor(CLIP).exp()
        scale = loss_coeff / q.shape[1] * grad_loss
        signal = score_gradient(attn_score[0], index_score[0], keep) * scale
        chosen = topk_indices[0] >= 0
        keys = k[0][topk_indices[0].clamp(min=0).long()].float().masked_fill(~chosen.unsqueeze(-1), 0.0)
        dq, dw, dkeys = indexer_gradients(q[0], keys, w[0], signal.masked_fill(~chosen, 0.0))
        d_index_k[0].zero_().index_add_(0, topk_indices[0][chosen].long(), dkeys[chosen])
        attn_score.fill_(torch.nan)
        return {"d_index_q": dq.to(BF16).unsqueeze(0), "d_weights": dw.to(BF16).unsqueeze(0), "d_index_k": d_index_k}

    def dense_indexer_backward_wrapper(  # noqa: PLR0913
        self, q, w, k, attn_score, attn_l1norm, index_score, index_lse, grad_loss, loss_coeff=1.0, ratio=1,
        q_causal_offsets=None, d_index_k=None,
    ):  # fmt: skip
        self._check_indexer_backward(q, w, k, grad_loss, d_index_k)
        rows, keys = q.shape[1], k.shape[1]
        for name, x, shape in (
            ("attn_score", attn_score, (1, rows, keys)), ("index_score", index_score, (1, rows, keys)),
            ("attn_l1norm", attn_l1norm, (1, rows)), ("index_lse", index_lse, (1, rows)),
        ):  # fmt: skip
            check_tensor(name, x, FP32, len(shape))
            require(x.shape == shape, f"{name} must have shape {shape}, got {tuple(x.shape)}")
        check_tensor("q_causal_offsets", q_causal_offsets, INT32, 1)
        require(ratio == 1 and q_causal_offsets.shape == (1,), "ratio or offsets")
        self._note("dense_indexer_backward", q.shape[2])
        shown = shown_keys(rows, keys, int(q_causal_offsets), 1)
        log_predict = (index_score[0] - index_lse[0][:, None]).masked_fill(~shown, -torch.inf)
        target = (attn_score[0] / (attn_l1norm[0][:, None] + EPS)).masked_fill(~shown, 0.0)
        signal = score_gradient(target, log_predict.exp(), log_predict >= CLIP) * (loss_coeff / rows * grad_loss)
        every_key = k[0].float().expand(rows, -1, -1)
        dq, dw, dkeys = indexer_gradients(q[0], every_key, w[0], signal.masked_fill(~shown, 0.0))
        d_index_k[0].copy_(dkeys.sum(0))
        attn_score.fill_(torch.nan)
        index_score.fill_(torch.nan)
        return {"d_index_q": dq.to(BF16).unsqueeze(0), "d_weights": dw.to(BF16).unsqueeze(0), "d_index_k": d_index_k}

    @staticmethod
    def _check_indexer_backward(q, w, k, grad_loss, d_index_k):
        check_tensor("index_q", q, BF16, 4)
        check_tensor("weights", w, BF16, 3)
        check_tensor("index_k", k, BF16, 3)
        check_tensor("d_index_k", d_index_k, (BF16, FP32), 3)
        require(q.shape[2] >= 64, f"heads must be at least 64, got {q.shape[2]}")
        require(w.shape == q.shape[:3] and d_index_k.shape == k.shape and q.shape[0] == 1, "shapes")
        require(grad_loss.dtype == FP32 and grad_loss.numel() == 1, "grad_loss must be one FP32 element")


def addresses(**tensors: Tensor) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in tensors.items()}


def ordered_bits(values: Tensor) -> Tensor:
    """Integers in the order of FP32 numbers as radix selection sees them: -0.0 below 0.0."""
    bits = values.view(INT32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """FP32 scores; + 0.0, because the kernel's accumulator starts at +0 and so never ends at -0."""
    dots = torch.einsum("tid,sd->tis", q.float(), k.float()).relu()
    return torch.einsum("ti,tis->ts", w.float(), dots) + 0.0


def shown_keys(rows: int, keys: int, offset: int, heads: int) -> Tensor:
    """Which keys the kernel does not mask: the visible ones and, with 32 heads, what the tile's other blocks leak."""
    limits = torch.arange(rows) + offset + 1
    shown = torch.arange(keys) < limits[:, None]
    if heads == 32:
        tile_limit = limits // 1 + 3 - torch.arange(rows) % 4
        masked_block = (tile_limit - 1).clamp(max=keys - 1) // 64
        shown = shown | (torch.arange(keys) < masked_block[:, None] * 64)
    return shown


def selected_logits(q: Tensor, kv: Tensor, ids: Tensor, length: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 logits over the selected keys (-inf elsewhere), which slots hold one, and the keys (0 elsewhere)."""
    chosen = (torch.arange(ids.shape[1]) < length[:, None]) & (ids >= 0) & (ids < kv.shape[0])
    keys = kv[ids.masked_fill(~chosen, 0).long()].float().masked_fill(~chosen.unsqueeze(-1), 0.0)
    logits = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    return logits.masked_fill(~chosen.unsqueeze(1), -torch.inf), chosen, keys


def score_gradient(target: Tensor, predict: Tensor, keep: Tensor) -> Tensor:
    """Gradient of the clipped KL in the scores."""
    signal = -target.clamp(min=float(torch.tensor(CLIP).exp())) * keep
    return signal - predict * signal.sum(-1, keepdim=True)


def indexer_gradients(q: Tensor, keys: Tensor, w: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dots = torch.einsum("tid,tkd->tik", q.float(), keys)
    dw = torch.einsum("tk,tik->ti", signal, dots.relu())
    ddots = (signal.unsqueeze(1) * w.float().unsqueeze(-1)) * (dots > 0)
    return torch.einsum("tik,tkd->tid", ddots, keys), dw, torch.einsum("tik,tid->tkd", ddots, q.float())


def kl_rows(target: Tensor, scores: Tensor, length: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """What ``triton_rows.kl_rows`` computes."""
    inside = torch.arange(target.shape[1], device=target.device) < length[:, None]
    scores = scores[:, : target.shape[1]].masked_fill(~inside, -torch.inf)
    target = target.masked_fill(~inside, 0.0)
    lse = scores.logsumexp(-1).masked_fill(length == 0, 0.0)
    mass = target.sum(-1)
    p = target / mass.clamp(min=torch.finfo(FP32).tiny)[:, None]
    log_predict = (scores - lse[:, None]).clamp(min=floor)
    return (torch.xlogy(p, p) - p * log_predict).masked_fill(~inside, 0.0).sum(-1), lse, mass


def backward_rows(
    target: Tensor, scores: Tensor, stats: tuple[Tensor, Tensor, Tensor], width: int, floor: float
) -> tuple[Tensor, Tensor]:
    """What ``triton_rows.backward_rows`` computes."""
    length, lse, mass = (x[:, None] for x in stats)
    tiny = torch.finfo(FP32).tiny
    inside = torch.arange(target.shape[1], device=target.device) < length
    log_predict = scores - lse
    predict = log_predict.exp().clamp(min=tiny).where(log_predict >= floor, -tiny)
    pad = (0, width - target.shape[1])
    masked = ((target / mass.clamp(min=tiny)).masked_fill(~inside, 0.0), predict.masked_fill(~inside, 0.0))
    return torch.nn.functional.pad(masked[0], pad), torch.nn.functional.pad(masked[1], pad)


def visible_lse(q: Tensor, kv: Tensor, scale: float, causal_offset: int) -> Tensor:
    """What ``triton_lse.visible_lse`` computes."""
    require(q.is_contiguous() and kv.is_contiguous() and q.shape[2] % 64 == 0, "q, kv or their width")
    logits = torch.einsum("thd,sd->ths", q.float(), kv.float()) * scale
    limits = torch.arange(q.shape[0], device=q.device) + causal_offset + 1
    hidden = torch.arange(kv.shape[0], device=q.device) >= limits[:, None]
    return logits.masked_fill(hidden.unsqueeze(1), -torch.inf).logsumexp(-1)


# Builds of FlashMLA by the function they would export: two that run on SM 9.0, and three that do not fit.
FLASH_BUILDS = {
    "sgl-flash-mla": Emulator.flash_mla_sparse_fwd,
    "upstream": Emulator.upstream_sparse_fwd,
    "base 2": Emulator.base2_sparse_fwd,
    "SM 10.0 only": Emulator.sm100_sparse_fwd,
    "without lengths": Emulator.lengthless_sparse_fwd,
}


def install(monkeypatch: pytest.MonkeyPatch, flash_build: str = "sgl-flash-mla") -> Emulator:
    """Stand in for the GPU packages until the test ends."""
    emulator = Emulator()
    modules = {
        "cudnn": {"DSA": emulator},
        "flash_mla": {"flash_mla_sparse_fwd": MethodType(FLASH_BUILDS[flash_build], emulator)},
        f"{CUDNN_BACKEND}.triton_rows": {"kl_rows": kl_rows, "backward_rows": backward_rows},
        f"{CUDNN_BACKEND}.triton_lse": {"visible_lse": visible_lse},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            monkeypatch.setattr(import_module(parent), leaf, module, raising=False)
    return emulator
