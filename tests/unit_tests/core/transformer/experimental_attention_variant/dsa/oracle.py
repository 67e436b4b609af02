"""DSA once more, in NumPy and FP64, one row at a time: what the tests of the reference compare with.

Nothing here comes from the package: visibility is read off a layout's segments, gradients are derived by hand. Names
carry shapes as the package's do: T rows, S keys, H attention heads, I indexer heads, D width, V value width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.transformer.experimental_attention_variant.dsa import Layout

Array = NDArray[Any]


def visible_keys_of(layout: Layout) -> list[range]:
    """The keys of each row; none on padding."""
    keys = [range(0)] * layout.num_rows
    for s in layout.segments:
        for row in range(s.row_start, s.row_stop):
            keys[row] = range(s.key_start, s.key_start + s.causal_offset + row - s.row_start + 1)
    return keys


def index_scores(q_ID: Array, k_SD: Array, w_I: Array, relu: bool = True) -> Array:
    """Index scores of one row."""
    logits_IS = q_ID @ k_SD.T
    return w_I @ (np.maximum(logits_IS, 0.0) if relu else logits_IS)


def best(scores_S: Array, visible: range, k: int) -> list[int]:
    """The ``k`` best visible keys, ascending; ties to the lowest id."""
    return sorted(sorted(visible, key=lambda s: (-scores_S[s], s))[:k])


def softmax(x: Array) -> Array:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def probabilities(q_HD: Array, kv_SD: Array, ids: Any, scale: float) -> Array:
    """Attention of one row's heads over ``ids``."""
    return softmax(q_HD @ kv_SD[list(ids)].T * scale)


def attend(q_HD: Array, kv_SD: Array, ids: Any, scale: float, value_dim: int) -> tuple[Array, Array]:
    """Output ``[H, V]`` and log-sum-exp ``[H]`` of one row."""
    if not len(ids):
        return np.zeros((len(q_HD), value_dim)), np.full(len(q_HD), np.inf)
    lse_H = np.log(np.exp(q_HD @ kv_SD[list(ids)].T * scale).sum(-1))
    return probabilities(q_HD, kv_SD, ids, scale) @ kv_SD[list(ids), :value_dim], lse_H


def kl_and_gradients(
    q_TID: Array, k_SD: Array, w_TI: Array, keys: list[Any], targets: list[Array]
) -> tuple[float, Array, Array, Array]:
    """KL sum over rows and its gradients in q, k, w; row ``t`` compares ``keys[t]``, with target ``targets[t]``.

    With ``S = softmax(I)`` and ``p`` the normalized target, ``dKL/dI = S - p``; the rest is the product rule.
    """
    total, dq, dk, dw = 0.0, np.zeros_like(q_TID), np.zeros_like(k_SD), np.zeros_like(w_TI)
    for t, ids in enumerate(keys):
        if not len(ids):
            continue
        k_ND, p_N = k_SD[list(ids)], targets[t] / targets[t].sum()
        logits_IN = q_TID[t] @ k_ND.T
        s_N = softmax(w_TI[t] @ np.maximum(logits_IN, 0.0))
        total += float(np.sum(np.where(p_N > 0, p_N * (np.log(np.where(p_N > 0, p_N, 1.0)) - np.log(s_N)), 0.0)))
        d_N = s_N - p_N
        dw[t] = np.maximum(logits_IN, 0.0) @ d_N
        d_logits_IN = w_TI[t][:, None] * (logits_IN > 0) * d_N
        dq[t] = d_logits_IN @ k_ND
        np.add.at(dk, list(ids), d_logits_IN.T @ q_TID[t])
    return total, dq, dk, dw


def rotate(x: Array, positions_T: Array, base: float, interleaved: bool) -> Array:
    """RoPE of the whole last dimension by complex multiplication; ``x`` is ``[T, ..., width]``."""
    half = x.shape[-1] // 2
    index = np.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
    first, second = (index[:, 0], index[:, 1]) if interleaved else index
    angles = positions_T[:, None] * base ** (-np.arange(half) / half)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles).reshape(len(x), *[1] * (x.ndim - 2), half)
    out = np.empty_like(x)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def hadamard(width: int) -> Array:
    """Sylvester's matrix, orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(width)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def indexer(weights: dict[str, Array], config: Any, x_TC: Array, qr_TR: Array, positions_T: Array) -> Any:
    """q, k and w as the report gives them; ``weights`` by parameter name."""
    heads, rope = config.dsa_indexer_n_heads, config.qk_pos_emb_head_dim
    q_TID = (qr_TR @ weights["linear_wq_b.weight"].T).reshape(len(x_TC), heads, -1)
    norm = weights["k_norm.weight"], weights["k_norm.bias"], config.dsa_indexer_k_norm_epsilon
    k_TD = layer_norm(x_TC @ weights["linear_wk.weight"].T, *norm)
    made = []
    for operand in (q_TID, k_TD):
        front = rotate(operand[..., :rope], positions_T, config.rotary_base, config.dsa_indexer_rope_interleaved)
        operand = np.concatenate((front, operand[..., rope:]), -1)
        made.append(operand @ hadamard(operand.shape[-1]) if config.dsa_indexer_rotate_activation else operand)
    w_TI = x_TC @ weights["linear_weights_proj.weight"].T * heads**-0.5 * made[0].shape[-1] ** -0.5
    return *made, w_TI
