"""The case table of the backend suite, its inputs, and the comparison with the reference.

A case is a layout x loss x attention heads x indexer heads x k x carrier of the indexer's operands. The table covers
every pair of (layout, heads) and, by construction, every pair of the other columns' values (a test counts them).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    Attended,
    AttentionInputs,
    IndexerInputs,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.config import DSAConfig
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout

LATENT, ROPE, INDEX_DIM = 512, 64, 128
WIDTH = LATENT + ROPE

CI_DOCUMENTS = (5, 70, 33, 129)
LONG_DOCUMENTS = (5, 2100, 300, 4096)


def offsets_of(lengths: tuple[int, ...], multiple: int = 1) -> tuple[int, ...]:
    return tuple(accumulate((-(-n // multiple) * multiple for n in lengths), initial=0))


def padded(lengths: tuple[int, ...], multiple: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return offsets_of(lengths), offsets_of(lengths, multiple)


def packed_with_tail(lengths: tuple[int, ...]) -> list[Layout]:
    """Documents, then rows (and keys) of padding."""
    real = offsets_of(lengths)
    return [Layout.packed((*real, real[-1]), (*real, real[-1] + 27))]


def zigzag(lengths: tuple[int, ...], size: int) -> list[Layout]:
    real, padding = padded(lengths, 2 * size)
    return [Layout.zigzag(real, size, rank, padding) for rank in range(size)]


def row_slices(lengths: tuple[int, ...]) -> list[Layout]:
    whole = Layout.packed(offsets_of(lengths))
    cuts = [0, 3, 77, whole.num_rows - 50, whole.num_rows]
    return [whole.slice_rows(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


LAYOUTS: dict[str, Callable[[tuple[int, ...]], list[Layout]]] = {
    "batch1": lambda lengths: [Layout.causal(1, max(lengths))],
    "batch3": lambda lengths: [Layout.causal(3, sorted(lengths)[-2])],
    "packed": lambda lengths: [Layout.packed(offsets_of(lengths))],
    "tail": packed_with_tail,
    "padded": lambda lengths: [Layout.packed(*padded(lengths, 16))],
    "zigzag2": lambda lengths: zigzag(lengths, 2),
    "zigzag8": lambda lengths: zigzag(lengths, 8),
    "slices": row_slices,
    "nothing": lambda lengths: [Layout.packed((0, 0), (0, 40))],
    "tiny": lambda lengths: [Layout.packed(offsets_of((1, 0, 1, 1, 0, 3, 1)))],
    "one": lambda lengths: [Layout.causal(1, 1)],
}
LOSSES = ("off", "sparse", "dense")
HEADS = (16, 32, 64, 96, 128)
INDEX_HEADS = (16, 32, 64)
CI_TOPK, LONG_TOPK = (64, 192), (705, 2048)
CARRIERS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    layout: str
    loss: str
    heads: int
    index_heads: int
    k: int
    carrier: torch.dtype
    documents: tuple[int, ...] = CI_DOCUMENTS

    def __str__(self) -> str:
        carrier = "bf16" if self.carrier is torch.bfloat16 else "fp32"
        return f"{self.layout}-{self.loss}-H{self.heads}-I{self.index_heads}-K{self.k}-{carrier}"

    def layouts(self) -> list[Layout]:
        return LAYOUTS[self.layout](self.documents)

    def config(self, **changes: Any) -> DSAConfig:
        loss = {} if self.loss == "off" else {"loss_coeff": 0.1, "use_sparse_loss": self.loss == "sparse"}
        return make_config(num_attention_heads=self.heads, n_heads=self.index_heads, topk=self.k, **loss, **changes)


def table(topk: tuple[int, ...] = CI_TOPK, documents: tuple[int, ...] = CI_DOCUMENTS) -> list[Case]:
    """Every pair of layout and heads; the other columns step at different rates, so that their pairs are met too."""
    return [
        Case(
            layout,
            LOSSES[(a + b) % 3],
            heads,
            INDEX_HEADS[(a + 2 * b + b // 3) % 3],
            topk[(a // 3 + b + a) % len(topk)],
            CARRIERS[(a // 2 + b // 2) % 2],
            documents,
        )
        for a, layout in enumerate(LAYOUTS)
        for b, heads in enumerate(HEADS)
    ]


def make_config(**changes: Any) -> DSAConfig:
    options: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_attention_heads": 16,
        "q_lora_rank": 64,
        "kv_lora_rank": LATENT,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": ROPE,
        "layernorm_epsilon": 1e-6,
        "n_heads": 32,
        "head_dim": INDEX_DIM,
        "topk": 64,
        "kernel_backend": "cudnn",
    }
    return DSAConfig(**(options | changes))


@dataclass
class Inputs:
    """Leaves of one call; every value of an attention operand is a BF16 number."""

    attention: AttentionInputs
    indexer: IndexerInputs
    dout: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.attention.q_THD, self.attention.kv_SD, self.indexer.q_TID, self.indexer.k_SD, self.indexer.w_TI]

    def double(self) -> Inputs:
        """The same numbers as FP64 leaves, for the reference."""
        q, kv, qi, ki, w = (x.detach().double().requires_grad_() for x in self.leaves())
        return Inputs(AttentionInputs(q, kv, self.attention.scale), IndexerInputs(qi, ki, w), self.dout.double())


def make_inputs(  # noqa: PLR0913
    layout: Layout,
    case: Case,
    device: torch.device,
    seed: int = 0,
    logit_scale: float = 1.0,
    draw_on: torch.device | None = None,
) -> Inputs:
    """Random leaves, drawn on the CPU so that both stages get the same, or where ``draw_on`` says, which is faster."""
    generator = torch.Generator(draw_on or "cpu").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device).to(dtype).to(device)

    rows, keys = layout.num_rows, layout.num_keys
    q = normal(rows, case.heads, WIDTH) * logit_scale
    w = normal(rows, case.index_heads, dtype=torch.float32) * (case.index_heads * INDEX_DIM) ** -0.5
    attention = AttentionInputs(q.requires_grad_(), normal(keys, WIDTH).requires_grad_(), WIDTH**-0.5)
    indexer = IndexerInputs(
        normal(rows, case.index_heads, INDEX_DIM, dtype=case.carrier).requires_grad_(),
        normal(keys, INDEX_DIM, dtype=case.carrier).requires_grad_(),
        w.requires_grad_(),
    )
    return Inputs(attention, indexer, normal(rows, case.heads, LATENT))


def kl_sum(backend: Any, inputs: Inputs, attended: Attended, topk: TopK, layout: Layout, dense: bool) -> Tensor:
    """What ``attention.py`` does between the last two verbs, for one tensor-parallel rank."""
    detached = AttentionInputs(inputs.attention.q_THD.detach(), inputs.attention.kv_SD.detach(), inputs.attention.scale)
    targets = backend.teacher(detached, attended, topk, layout, dense)
    kl: Tensor = backend.indexer_loss(inputs.indexer, targets, topk, layout, dense)
    return kl


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over norm of what is wanted; NaN never passes."""
    got, wanted = got.detach(), wanted.detach()
    difference = (got.double() - wanted.double()).norm()
    error = float(difference / wanted.double().norm()) if float(wanted.double().norm()) else float(difference)
    return math.inf if math.isnan(error) else error


def garbage_past_length(topk: TopK) -> TopK:
    """The same selection with NaN scores where a row has none."""
    if topk.scores_TK is None:
        return topk
    return topk._replace(scores_TK=topk.scores_TK.masked_fill(topk.indices_TK < 0, torch.nan))
