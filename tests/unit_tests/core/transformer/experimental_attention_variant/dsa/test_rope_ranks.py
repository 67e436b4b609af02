"""A BF16 model's FP32 indexer keys (``rope_fp32``) over ranks: every rank scores the bits that one process scores.

One spawn of two Gloo processes. Projections are stubs, since a matrix product's bits depend on its row count; scores
are FP8, since only then do the bits below BF16 reach the selection.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
    record_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.ranks import run_on_ranks

from .golden_fp8 import HEAD_DIM, bits, fp8_config
from .test_parallel import Case, rows_of
from .test_rope_precision import HEADS, Gate, Passes

REAL, PADDED = (0, 13, 13, 14, 30), (0, 16, 16, 24, 40)
LATENT, ROPE, TOPK = 16, 64, 5
CASES = [Case(1, 2, False, True, None), Case(2, 1, False, True, None), Case(2, 1, True, True, None)]
ONE = Case(1, 1, False, True, None)


def make_module(case: Case, groups: SimpleNamespace | None, seen: list[IndexerInputs]) -> DSAttention:
    """A layer in BF16 that scores in FP8 on the reference, and notes what it scores."""
    options: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HEAD_DIM, "num_attention_heads": 2, "q_lora_rank": HEADS * HEAD_DIM,
        "kv_lora_rank": LATENT, "qk_head_dim": 8, "qk_pos_emb_head_dim": ROPE, "v_head_dim": 8, "rope_type": "rope",
        "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu", "bf16": True,
        "experimental_attention_variant": "dsa", "dsa_indexer_n_heads": HEADS, "dsa_indexer_head_dim": HEAD_DIM,
        "dsa_indexer_topk": TOPK, "dsa_indexer_k_norm_fp32": True, "dsa_indexer_rope_fp32": True,
        "dsa_indexer_rotate_activation": False, "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp, "sequence_parallel": case.sequence_parallel, "cp_comm_type": "allgather",
    }  # fmt: skip
    stubs = DSAIndexerSubmodules(Passes, Passes, None, Gate)
    submodules = DSAttentionSubmodules(indexer=ModuleSpec(DSAIndexer, submodules=stubs))
    module = DSAttention(MLATransformerConfig(**options), submodules, layer_number=1, pg_collection=groups)
    fp8 = ReferenceBackend(fp8_config("08", n_heads=HEADS, topk=TOPK))

    def select(indexer: IndexerInputs, layout: Layout, k: int) -> TopK:
        seen.append(indexer)
        return fp8.select(indexer, layout, k)

    module.backend.select = select  # type: ignore[method-assign]
    return module


@cache
def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (2, LATENT + ROPE), "key": (LATENT + ROPE,), "x": (HEAD_DIM,), "qr": (HEADS * HEAD_DIM,)}
    return {n: torch.randn(PADDED[-1], *s, generator=generator).bfloat16() for n, s in shapes.items()}


def run(case: Case, rank: int, group: dist.ProcessGroup | None) -> tuple[IndexerInputs, Tensor, Tensor]:
    """What a rank scores and selects, and its rows among those of one process."""
    rows = rows_of(case, rank if case.cp > 1 else 0)
    share = len(rows) // case.tp
    own = rows[rank * share : (rank + 1) * share] if case.tp > 1 else rows
    held = own if case.sequence_parallel else rows
    inputs, heads = make_inputs(), slice(rank, rank + 1) if case.tp > 1 else slice(None)
    groups = SimpleNamespace(tp=group if case.tp > 1 else None, cp=group if case.cp > 1 else None)
    seen: list[IndexerInputs] = []
    module = make_module(case, groups, seen)
    packed = PackedSeqParams.from_offsets(REAL, PADDED)
    context = ForwardContext.build(1, len(rows), packed, "cpu", cp_group=groups.cp)
    with record_topk(module) as record, torch.no_grad():
        module(
            inputs["query"][rows][:, heads], inputs["key"][held], x=inputs["x"][held], qr=inputs["qr"][held],
            context=context,
        )  # fmt: skip
    (indexer,) = seen
    return indexer, record[1].indices_TK, own


def faults() -> dict[str, list[str]]:
    """What differs on this rank from one process, by case."""
    wanted, wanted_ids, _ = run(ONE, 0, None)
    found = {}
    for case in CASES:
        rank = dist.get_rank()
        got, ids, own = run(case, rank, dist.group.WORLD)
        pairs = {
            "keys": (got.k_SD, wanted.k_SD),
            "queries": (got.q_TID, wanted.q_TID[own]),
            "head weights": (got.w_TI, wanted.w_TI[own]),
            "ids": (ids, wanted_ids[rows_of(case, rank if case.cp > 1 else 0)]),
        }
        found[str(case)] = [n for n, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(bits(a), bits(b))]
    return found


@cache
def ranks() -> list[dict[str, list[str]]]:
    return run_on_ranks(2, faults)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_keys_arrive_bit_for_bit(case: Case) -> None:
    assert [results[str(case)] for results in ranks()] == [[], []]


def test_the_bits_below_bf16_matter() -> None:
    """Keys and queries are FP32 numbers that BF16 cannot hold, and rounding the keys selects other ones."""
    indexer, ids, _ = run(ONE, 0, None)
    assert indexer.k_SD.dtype == indexer.q_TID.dtype == torch.float32
    assert float((indexer.k_SD != indexer.k_SD.bfloat16().float()).float().mean()) > 0.9
    rounded = IndexerInputs(indexer.q_TID, indexer.k_SD.bfloat16(), indexer.w_TI)
    other = ReferenceBackend(fp8_config("08", n_heads=HEADS, topk=TOPK)).select(
        rounded, Layout.packed(REAL, PADDED), TOPK
    )
    assert not torch.equal(other.indices_TK, ids)
