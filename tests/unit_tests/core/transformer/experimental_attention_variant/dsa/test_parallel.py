"""DSAttention over ranks against one process: outputs, selected keys, the KL loss and every gradient.

One spawn of four Gloo processes runs all cases, each on the ranks that it needs. Operands and scores are FP32, so
what is compared differs by summation order alone.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
    LossTracker,
    record_topk,
    replay_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, positions
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

WORLD = 4
HEADS, WIDTH, HIDDEN, RANK = 4, 20, 24, 12
# A document that ends inside a padded chunk, an empty one, one of a single token, and equal ends.
REAL = (0, 13, 13, 14, 30)
PADDED = (0, 16, 16, 24, 40)


@dataclass(frozen=True)
class Case:
    tp: int
    cp: int
    sequence_parallel: bool
    sparse: bool
    loss: float | None = 0.7

    def __str__(self) -> str:
        rows = "-sp" if self.sequence_parallel else ""
        loss = "off" if not self.loss else "sparse" if self.sparse else "dense"
        return f"tp{self.tp}-cp{self.cp}{rows}-{loss}"


SHAPES = [(2, 1, False), (2, 1, True), (1, 2, False), (1, 4, False), (2, 2, True), (2, 2, False)]
SHAPES += [(4, 1, True), (4, 1, False)]
CASES = [Case(*shape, sparse) for shape, sparse in product(SHAPES, (True, False))] + [Case(2, 2, True, True, None)]


def make_config(case: Case, parallel: bool) -> MLATransformerConfig:
    sizes = dict(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        sequence_parallel=case.sequence_parallel,
        cp_comm_type="allgather",
    )
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        q_lora_rank=RANK,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        rope_type="rope",
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=2,
        dsa_indexer_head_dim=8,
        dsa_indexer_topk=5,
        dsa_indexer_loss_coeff=case.loss,
        dsa_indexer_use_sparse_loss=case.sparse and case.loss is not None,
        dsa_indexer_scoring_precision="fp32",
        **(sizes if parallel else {}),
    )


def make_module(config: MLATransformerConfig, groups: SimpleNamespace | None) -> DSAttention:
    torch.manual_seed(7)
    linears = DSAIndexerSubmodules(ReplicatedLinear, ReplicatedLinear, None, ReplicatedLinear)
    submodules = DSAttentionSubmodules(indexer=ModuleSpec(DSAIndexer, submodules=linears))
    module = DSAttention(config, submodules, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return module


def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (HEADS, WIDTH), "key": (WIDTH,), "x": (HIDDEN,), "qr": (RANK,), "dout": (HEADS, 16)}
    return {name: torch.randn(PADDED[-1], *shape, generator=generator) for name, shape in shapes.items()}


def run(module: DSAttention, inputs: dict[str, Tensor], context: ForwardContext) -> dict[str, Tensor]:
    """Output, selected ids, KL sum, and gradients of ``sum(output * dout)`` plus the attached loss."""
    query, key = inputs["query"].clone().requires_grad_(), inputs["key"].clone().requires_grad_()
    with record_topk(module) as record:
        out = module(query, key, x=inputs["x"], qr=inputs["qr"], context=context)
    (out * inputs["dout"].flatten(1)).sum().backward()
    with replay_topk(module, record):
        replayed = module(query, key, x=inputs["x"], qr=inputs["qr"], context=fresh(context))
    assert torch.equal(replayed, out)
    assert query.grad is not None and key.grad is not None
    results = {"out": out.detach(), "ids": record[1].indices_TK, "query": query.grad, "key": key.grad}
    results["kl"] = context.losses.kl_sums.get(1, torch.zeros(()))
    results["kl rows"] = torch.tensor(float(context.losses.rows.get(1, 0)))
    return results | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def fresh(context: ForwardContext) -> ForwardContext:
    cache = type(context.topk_cache)()
    return ForwardContext(context.layout, context.positions_T, cache, LossTracker(), context.key_order)


def expected(case: Case) -> dict[str, Tensor]:
    module = make_module(make_config(case, parallel=False), None)
    layout = Layout.packed(REAL, PADDED)
    losses = LossTracker(normalizer=float(REAL[-1]))
    context = ForwardContext.build(1, PADDED[-1], PackedSeqParams.from_offsets(REAL, PADDED), "cpu", losses)
    assert context.layout == layout and torch.equal(context.positions_T, positions(layout, "cpu"))
    return run(module, make_inputs(), context)


def rows_of(case: Case, cp_rank: int) -> Tensor:
    """Global rows of one context-parallel rank, spelled out."""
    rows: list[int] = []
    for start, stop in zip(PADDED, PADDED[1:], strict=False):
        chunk = (stop - start) // (2 * case.cp)
        for index in (cp_rank, 2 * case.cp - 1 - cp_rank) if case.cp > 1 else (0, 1):
            rows += range(start + index * chunk, start + (index + 1) * chunk)
    return torch.tensor(rows)


@cache
def groups_of(tp: int, cp: int, rank: int) -> tuple[SimpleNamespace, int, int]:
    """Groups of a mesh with tp fastest; every process creates all of them, as torch.distributed wants."""
    mine = SimpleNamespace(tp=None, cp=None)
    for cp_rank in range(cp):
        ranks = [cp_rank * tp + t for t in range(tp)]
        group = dist.new_group(ranks)
        mine.tp = group if rank in ranks and tp > 1 else mine.tp
    for tp_rank in range(tp):
        ranks = [c * tp + tp_rank for c in range(cp)]
        group = dist.new_group(ranks)
        mine.cp = group if rank in ranks and cp > 1 else mine.cp
    return mine, rank % tp, rank // tp


def local_inputs(case: Case, tp_rank: int, cp_rank: int) -> dict[str, Tensor]:
    """One rank's rows and heads of ``make_inputs``."""
    inputs, rows = make_inputs(), rows_of(case, cp_rank)
    share = len(rows) // case.tp
    heads = slice(tp_rank * HEADS // case.tp, (tp_rank + 1) * HEADS // case.tp)
    held = rows[tp_rank * share : (tp_rank + 1) * share] if case.sequence_parallel else rows
    by_head = {name: inputs[name][rows][:, heads] for name in ("query", "dout")}
    return by_head | {name: inputs[name][held] for name in ("key", "x", "qr")}


def check(case: Case, rank: int) -> None:
    groups, tp_rank, cp_rank = groups_of(case.tp, case.cp, rank)
    if rank >= case.tp * case.cp:
        return
    wanted, local = expected(case), local_inputs(case, tp_rank, cp_rank)
    rows = rows_of(case, cp_rank)
    share = len(rows) // case.tp
    local_rows = rows[tp_rank * share : (tp_rank + 1) * share] if case.sequence_parallel else rows
    heads = slice(tp_rank * HEADS // case.tp, (tp_rank + 1) * HEADS // case.tp)
    losses = LossTracker(normalizer=float(REAL[-1]))
    packed = PackedSeqParams.from_offsets(REAL, PADDED)
    context = ForwardContext.build(1, len(rows), packed, "cpu", losses, groups.cp)
    module = make_module(make_config(case, parallel=True), groups)
    got = run(module, local, context)

    assert torch.equal(got["ids"], wanted["ids"][rows]), "every rank attends to one process's keys"
    out = wanted["out"].unflatten(1, (HEADS, -1))[rows][:, heads].flatten(1)
    compare("out", got["out"], out)
    compare("query", got["query"], wanted["query"][rows][:, heads])
    compare("key", got["key"], wanted["key"][local_rows])
    compare("kl", summed(got["kl"].reshape(1), groups), wanted["kl"].reshape(1))
    assert float(summed(got["kl rows"], groups)) == (REAL[-1] if case.loss else 0)
    trained = {name for name in got if name.startswith("indexer")}
    assert trained == ({name for name, _ in module.named_parameters()} if case.loss else set())
    for name in sorted(trained):  # every rank sums in one order
        marked = getattr(module.get_parameter(name), "tensor_parallel_grad", None)
        assert marked == ("sum" if case.tp > 1 else None)
        compare(name, summed(got[name], groups), wanted[name])


def summed(x: Tensor, groups: SimpleNamespace) -> Tensor:
    """The sum over tensor- and context-parallel ranks."""
    total = x.clone()
    for group in (groups.tp, groups.cp):
        if group is not None:
            dist.all_reduce(total, group=group)
    return total


def compare(name: str, got: Tensor, wanted: Tensor) -> None:
    error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-12)) if wanted.norm() else float(got.norm())
    assert error < 1e-5, (name, error)


def work(rank: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    failures = {}
    for case in CASES:
        try:
            check(case, rank)
        except Exception:
            failures[str(case)] = traceback.format_exc()
    torch.save(failures, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder / "rendezvous"), str(folder)), nprocs=WORLD)
    found: dict[str, str] = {}
    for rank in range(WORLD):
        for case, text in torch.load(folder / f"{rank}.pt").items():
            found.setdefault(case, f"rank {rank}: {text}")
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_equal_one_process(case: Case, failures: dict[str, str]) -> None:
    assert str(case) not in failures, failures[str(case)]


def test_one_process_trains_the_indexer() -> None:
    """The comparison above has something to compare: keys are dropped, and every indexer weight gets a gradient."""
    wanted = expected(Case(1, 1, False, True))
    assert (wanted["ids"] >= 0).sum(1).max() == 5 and REAL[-1] > 5
    assert float(wanted["kl"]) > 0.1
    assert all(float(wanted[f"indexer.{name}.weight"].norm()) > 1e-4 for name in ("linear_wq_b", "linear_wk", "k_norm"))
