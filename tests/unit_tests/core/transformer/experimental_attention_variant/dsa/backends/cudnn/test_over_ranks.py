"""Both backends over two context-parallel ranks against one process: every layout and loss, and who runs which kernels.

One spawn of two Gloo processes runs the whole table, the cudnn backend on its emulator. Both sides of a comparison run
the same kernels, so ids are equal, and the rest differs by the order of sums and, in cudnn, by where they are rounded
to BF16. A rank may hold nothing but padding: it must take part in every collective, backward too, and launch nothing
that has no rows.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    LossTracker,
    record_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.ranks import run_on_ranks

from ...test_parallel import make_module as build_drawn
from .. import emulator
from ..cases import LATENT, LOSSES, WIDTH, relative_error

CP, HEADS, HIDDEN, RANK = 2, 16, 24, 12
# Real and padded cumulative lengths; None: a [2, 20] batch.
LAYOUTS = {
    "batch": None,
    "packed": ((0, 12, 12, 40), (0, 12, 12, 40)),
    "padded": ((0, 13, 13, 14, 30), (0, 16, 16, 24, 40)),
    "padding-rank": ((0, 3), (0, 40)),
}
ROWS = 40
# Gradients are rounded to BF16 once a rank.
TOLERANCE = {"none": 1e-5, "cudnn": 8e-3}
SELECTING = {"indexer_forward", "indexer_top_k"}
LOSS_KERNELS = {
    "off": set(),
    "sparse": {"sparse_target", "indexer_backward"},
    "dense": {"dense_target", "dense_indexer_backward"},
}


@dataclass(frozen=True)
class Case:
    backend: str
    layout: str
    loss: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.layout}-{self.loss}"

    @property
    def padded(self) -> tuple[int, ...]:
        offsets = LAYOUTS[self.layout]
        return (0, ROWS // 2, ROWS) if offsets is None else offsets[1]

    def context(self, ranks: int, group: dist.ProcessGroup | None) -> ForwardContext:
        offsets = LAYOUTS[self.layout]
        packed = None if offsets is None else PackedSeqParams.from_offsets(*offsets)
        batch = 2 if offsets is None else 1
        return ForwardContext.build(batch, ROWS // ranks // batch, packed, "cpu", LossTracker(7.0), group)

    def rows(self, rank: int) -> Tensor:
        """Global rows of a context-parallel rank, spelled out."""
        rows: list[int] = []
        for start, stop in pairwise(self.padded):
            chunk = (stop - start) // (2 * CP)
            for index in (rank, 2 * CP - 1 - rank):
                rows += range(start + index * chunk, start + (index + 1) * chunk)
        return torch.tensor(rows)


CASES = [Case(*names) for names in product(("none", "cudnn"), LAYOUTS, LOSSES)]


def make_module(case: Case, ranks: int, group: dist.ProcessGroup | None) -> DSAttention:
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        q_lora_rank=RANK,
        kv_lora_rank=LATENT,
        qk_head_dim=8,
        qk_pos_emb_head_dim=WIDTH - LATENT,
        v_head_dim=8,
        rope_type="rope",
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=32,
        dsa_indexer_head_dim=128,
        dsa_indexer_topk=5,
        dsa_indexer_loss_coeff=None if case.loss == "off" else 0.7,
        dsa_indexer_use_sparse_loss=case.loss == "sparse",
        context_parallel_size=ranks,
        cp_comm_type="allgather",
    )
    module = build_drawn(config, SimpleNamespace(tp=None, cp=group))
    if case.backend == "cudnn":  # a module that is built with it asks for its device
        module.backend = CudnnBackend(module.dsa)
    return module


@cache
def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (HEADS, WIDTH), "key": (WIDTH,), "x": (HIDDEN,), "qr": (RANK,), "dout": (HEADS, LATENT)}
    return {name: torch.randn(ROWS, *shape, generator=generator) for name, shape in shapes.items()}


def run(case: Case, ranks: int, group: dist.ProcessGroup | None, rows: Tensor) -> dict[str, Tensor]:
    module, context = make_module(case, ranks, group), case.context(ranks, group)
    inputs = {name: x[rows] for name, x in make_inputs().items()}
    query, key = inputs["query"].requires_grad_(), inputs["key"].requires_grad_()
    with record_topk(module) as record:
        out = module(query, key, x=inputs["x"], qr=inputs["qr"], context=context)
    (out * inputs["dout"].flatten(1)).sum().backward()
    assert query.grad is not None and key.grad is not None
    results = {"out": out.detach(), "ids": record[1].indices_TK, "query": query.grad, "key": key.grad}
    if case.loss != "off":
        results["kl"] = context.losses.kl_sums[1]
    return results | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check(case: Case, kernels: emulator.Emulator) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = case.rows(rank)
    kernels.calls.clear()
    got = run(case, CP, group, rows)
    launched = dict(kernels.calls)
    wanted = run(case, 1, None, torch.arange(ROWS))

    assert torch.equal(got["ids"], wanted["ids"][rows])
    assert got.keys() == wanted.keys()
    for name in got.keys() - {"ids"}:
        by_row = name in ("out", "query", "key")
        total = got[name].clone()
        if not by_row:
            dist.all_reduce(total)
        error = relative_error(total, wanted[name][rows] if by_row else wanted[name])
        assert error < (1e-5 if name in ("out", "kl") else TOLERANCE[case.backend]), (name, error)
    if case.backend == "none":
        assert launched == {}
    else:
        attending, has_rows = {"flash_mla", "sparse_backward"}, bool((got["ids"] >= 0).any())
        assert set(launched) - LOSS_KERNELS[case.loss] == attending | (SELECTING if has_rows else set())
        assert not has_rows or LOSS_KERNELS[case.loss] <= set(launched)
        assert has_rows or not LOSS_KERNELS["dense"] & set(launched)


def work() -> dict[str, str]:
    failures = {}
    with pytest.MonkeyPatch.context() as patch:
        kernels = emulator.install(patch)
        for case in CASES:
            try:
                check(case, kernels)
            except Exception:
                failures[str(case)] = traceback.format_exc()
    return failures


@cache
def failures() -> dict[str, str]:
    found: dict[str, str] = {}
    for rank, by_case in enumerate(run_on_ranks(CP, work, timeout=120)):
        for case, text in by_case.items():
            found.setdefault(case, f"rank {rank}: {text}")
    return found


def test_two_ranks_equal_one_process() -> None:
    assert failures() == {}, "\n".join(failures().values())


def test_the_table_holds_a_rank_of_padding_alone_and_keys_that_are_dropped() -> None:
    layouts = {name: Case("none", name, "dense") for name in LAYOUTS}
    assert not any(layouts["padding-rank"].rows(1) < 3) and any(layouts["padding-rank"].rows(0) < 3)
    wanted = run(layouts["packed"], 1, None, torch.arange(ROWS))
    assert int((wanted["ids"] >= 0).sum(1).max()) == 5 and float(wanted["kl"]) > 0.1
