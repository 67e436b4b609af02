"""Both backends over two ranks against one process: each way of sharding, layout and loss, and who runs which kernels.

One spawn of two Gloo processes runs the whole table, the cudnn backend on its emulator, and on a GPU (which both share)
on the kernels. Both sides of a comparison run the same kernels, so ids are equal, and the rest differs by the order of
sums and, in cudnn, by where they are rounded to BF16. A rank may hold nothing but padding: it must take part in every
collective, backward too, and launch nothing that has no rows.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

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

WORLD, HEADS, HIDDEN, RANK = 2, 32, 24, 12
# Real and padded cumulative lengths; None: a [2, 20] batch.
LAYOUTS = {
    "batch": None,
    "packed": ((0, 12, 12, 40), (0, 12, 12, 40)),
    "padded": ((0, 13, 13, 14, 30), (0, 16, 16, 24, 40)),
    "padding-rank": ((0, 3), (0, 40)),
}
ROWS = 40
SPLITS: dict[str, dict[str, Any]] = {
    "cp": {"context_parallel_size": WORLD, "cp_comm_type": "allgather"},
    "tp": {"tensor_model_parallel_size": WORLD},
    "tp-sp": {"tensor_model_parallel_size": WORLD, "sequence_parallel": True},
}
# Gradients are rounded to BF16 once a rank, and on a GPU outputs, whose sums kernels may order by their rows.
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
    split: str
    layout: str
    loss: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.split}-{self.layout}-{self.loss}"

    @property
    def padded(self) -> tuple[int, ...]:
        offsets = LAYOUTS[self.layout]
        return (0, ROWS // 2, ROWS) if offsets is None else offsets[1]

    def context(self, cp_group: dist.ProcessGroup | None, device: str) -> ForwardContext:
        offsets = LAYOUTS[self.layout]
        packed = None if offsets is None else PackedSeqParams.from_offsets(*offsets)
        batch = 2 if offsets is None else 1
        length = ROWS // (WORLD if cp_group else 1) // batch
        return ForwardContext.build(batch, length, packed, device, LossTracker(7.0), cp_group)

    def rows(self, rank: int) -> Tensor:
        """Global rows that a rank attends from, spelled out."""
        if self.split != "cp":
            return torch.arange(ROWS)
        rows: list[int] = []
        for start, stop in pairwise(self.padded):
            chunk = (stop - start) // (2 * WORLD)
            for index in (rank, 2 * WORLD - 1 - rank):
                rows += range(start + index * chunk, start + (index + 1) * chunk)
        return torch.tensor(rows)

    def held(self, rank: int) -> Tensor:
        """Global rows of the hidden states and latent keys that a rank holds."""
        return self.rows(rank).chunk(WORLD)[rank] if self.split == "tp-sp" else self.rows(rank)

    def scored(self, rank: int) -> Tensor:
        """Global rows for which a rank runs its indexer."""
        return self.rows(rank) if self.split == "cp" else self.rows(rank).chunk(WORLD)[rank]

    def heads(self, rank: int) -> slice:
        share = HEADS // WORLD
        return slice(0, HEADS) if self.split == "cp" else slice(rank * share, (rank + 1) * share)


CASES = [Case(*names) for names in product(("none", "cudnn"), SPLITS, LAYOUTS, LOSSES)]


def make_module(case: Case, group: dist.ProcessGroup | None, device: str) -> DSAttention:
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
        **(SPLITS[case.split] if group else {}),
    )
    groups = SimpleNamespace(tp=None, cp=group) if case.split == "cp" else SimpleNamespace(tp=group, cp=None)
    module = build_drawn(config, groups).to(device)
    if case.backend == "cudnn":  # a module that is built with it asks for its device
        module.backend = CudnnBackend(module.dsa)
    return module


@cache
def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (HEADS, WIDTH), "key": (WIDTH,), "x": (HIDDEN,), "qr": (RANK,), "dout": (HEADS, LATENT)}
    return {name: torch.randn(ROWS, *shape, generator=generator) for name, shape in shapes.items()}


def run(case: Case, group: dist.ProcessGroup | None, device: str) -> dict[str, Tensor]:
    """One forward and backward of this rank's share, or of all of it."""
    rows = held = torch.arange(ROWS)
    heads = slice(0, HEADS)
    if group:
        rank = dist.get_rank(group)
        rows, held, heads = case.rows(rank), case.held(rank), case.heads(rank)
    module, context = make_module(case, group, device), case.context(group if case.split == "cp" else None, device)
    inputs = {name: x.to(device) for name, x in make_inputs().items()}
    query, dout = (inputs[name][rows][:, heads].requires_grad_(name == "query") for name in ("query", "dout"))
    key = inputs["key"][held].requires_grad_()
    with record_topk(module) as record:
        out = module(query, key, x=inputs["x"][held], qr=inputs["qr"][held], context=context)
    (out * dout.flatten(1)).sum().backward()
    assert query.grad is not None and key.grad is not None
    results = {"out": out.detach().unflatten(1, (-1, LATENT)), "ids": record[1].indices_TK}
    results |= {"query": query.grad, "key": key.grad}
    if case.loss != "off":
        results["kl"] = context.losses.kl_sums[1]
    return results | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def check(case: Case, kernels: emulator.Emulator | None, device: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    launched = kernels.calls if kernels else {}
    launched.clear()
    got = run(case, group, device)
    launched = dict(launched)
    wanted = run(case, None, device)

    rows, held, heads = case.rows(rank).to(device), case.held(rank).to(device), case.heads(rank)
    assert torch.equal(got["ids"], wanted["ids"][rows])
    assert got.keys() == wanted.keys()
    own = {"out": wanted["out"][rows][:, heads], "query": wanted["query"][rows][:, heads], "key": wanted["key"][held]}
    exact = {"kl"} if kernels is None and case.backend == "cudnn" else {"kl", "out"}
    for name in got.keys() - {"ids"}:
        total = got[name].clone()
        if name not in own:
            dist.all_reduce(total)
        error = relative_error(total, own.get(name, wanted[name]))
        assert error < (1e-5 if name in exact else TOLERANCE[case.backend]), (name, error)
    if kernels is None:
        return
    if case.backend == "none":
        assert launched == {}
        return
    attending, scored = {"flash_mla", "sparse_backward"}, wanted["ids"][case.scored(rank)]
    has_rows = bool((scored >= 0).any())
    assert set(launched) - LOSS_KERNELS[case.loss] == attending | (SELECTING if has_rows else set())
    assert not has_rows or LOSS_KERNELS[case.loss] <= set(launched)
    # The teacher attends from all rows of its heads, so tensor-parallel ranks run its kernel for each other's rows.
    idle = LOSS_KERNELS["dense"] if case.split == "cp" else {"dense_indexer_backward"}
    assert has_rows or not idle & set(launched)


def work(device: str) -> dict[str, str]:
    failures = {}
    with pytest.MonkeyPatch.context() if device == "cpu" else nullcontext() as patch:
        kernels = emulator.install(patch) if patch else None
        for case in CASES:
            if device == "cuda" and case.backend == "none":
                continue
            try:
                check(case, kernels, device)
            except Exception:
                failures[str(case)] = traceback.format_exc()
    return failures


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_equal_one_process(device: str) -> None:
    found: dict[str, str] = {}
    for rank, by_case in enumerate(run_on_ranks(WORLD, work, device, timeout=280)):
        for case, text in by_case.items():
            found.setdefault(case, f"rank {rank}: {text}")
    assert not found, "\n".join([" ".join(found), *found.values()])


def test_the_table_holds_a_rank_of_padding_alone_and_keys_that_are_dropped() -> None:
    layouts = {name: Case("none", "cp", name, "dense") for name in LAYOUTS}
    assert not any(layouts["padding-rank"].rows(1) < 3) and any(layouts["padding-rank"].rows(0) < 3)
    wanted = run(layouts["packed"], None, "cpu")
    assert int((wanted["ids"] >= 0).sum(1).max()) == 5 and float(wanted["kl"]) > 0.1
