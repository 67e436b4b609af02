"""Sizes that only a GPU holds: 256K keys, a million rows, dense losses and saved bytes of long sequences.

Each test takes seconds on an H200 and less than 100 GiB. No scoring call ever has 2^31 cells, since the byte budget
cuts them; what is checked around that number is a whole selection.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, frontend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.scoring import BYTE_BUDGET
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    Attended,
    AttentionInputs,
    IndexerInputs,
    TeacherChunk,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds, valid_rows
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from .. import cases
from ..cases import Case, Inputs
from ..conftest import Stage
from ..test_backends import (
    ATTENTION_GRAD_TOLERANCE,
    INDEXER_GRAD_TOLERANCE,
    KL_TOLERANCE,
    OUT_TOLERANCE,
    SCORE_TOLERANCE,
    check_case,
    run,
)

pytestmark = pytest.mark.gpu_long
BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
MIB = 2**20


def check_rows(inputs: Inputs, layout: Layout, topk: TopK, rows: list[int], out_THV: Tensor | None = None) -> None:
    """Selections, and outputs if given, of a few rows in FP64."""
    starts, ends = (bounds[rows].tolist() for bounds in row_bounds(layout, DEVICE))
    indexer, attention = inputs.indexer, inputs.attention
    for row, start, end in zip(rows, starts, ends, strict=True):
        dots = (indexer.q_TID[row].detach().double() @ indexer.k_SD[start:end].detach().double().T).relu()
        scores = indexer.w_TI[row].detach().double() @ dots
        count = min(topk.indices_TK.shape[1], end - start)
        ids = topk.indices_TK[row, :count].long()
        assert bool((topk.indices_TK[row, count:] == -1).all() and (ids[1:] > ids[:-1]).all())
        assert start <= int(ids[0]) and int(ids[-1]) < end
        found, best = scores[ids - start].sort().values, scores.topk(count).values.sort().values
        assert torch.allclose(found, best, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
        if out_THV is not None:
            keys = attention.kv_SD[ids].detach().double()
            weights = (attention.q_THD[row].detach().double() @ keys.T * attention.scale).softmax(-1)
            assert cases.relative_error(out_THV[row], weights @ keys[:, : cases.LATENT]) < OUT_TOLERANCE


DOCUMENTS = {"one": (262144,), "seven": (100003, 70001, 40009, 30011, 15013, 5003, 2001)}


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_context_parallel_rows_of_256k_tokens(documents: str) -> None:
    """Rank 0 of 8, whose late chunk sees everything; scoring's workspace stays within the byte budget."""
    layout = cases.zigzag(DOCUMENTS[documents], 8)[0]
    case = Case("", "off", 64, 64, 2048, BF16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, DEVICE, draw_on=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    topk = backend.select(inputs.indexer, layout, case.k)
    # Beyond it: ids, those of one call once more, and a call's own copy of the keys.
    allowed = BYTE_BUDGET + 2 * topk.indices_TK.nbytes + 2 * inputs.indexer.k_SD.nbytes + 256 * MIB
    assert torch.cuda.max_memory_allocated() - before < allowed
    attended = backend.attend(inputs.attention, topk, layout)
    valid = valid_rows(layout, DEVICE).nonzero().flatten()
    sampled = valid[torch.linspace(0, valid.numel() - 1, 64).long().to(DEVICE)].tolist()
    check_rows(inputs, layout, topk, sampled, attended.out_THV.detach())


@pytest.mark.parametrize("rows", [8191, 8192, 8193])
def test_a_winner_in_the_last_column(rows: int) -> None:
    """Rows times columns just below, at and above 2^31; the last row's best key is its own."""
    columns = 262144
    layout, case = Layout.causal(1, columns).slice_rows(columns - rows, columns), Case("", "off", 16, 16, 2048, BF16)
    inputs = cases.make_inputs(layout, case, DEVICE, draw_on=DEVICE)
    with torch.no_grad():
        inputs.indexer.w_TI[-1].abs_()
        inputs.indexer.k_SD[-1] = 4 * inputs.indexer.q_TID[-1, 0]
    topk = CudnnBackend(case.config()).select(inputs.indexer, layout, case.k)
    assert int(topk.indices_TK[-1, -1]) == columns - 1
    check_rows(inputs, layout, topk, [0, rows // 2, rows - 2, rows - 1])


ROWS, LENGTH, CHUNK = 1_048_640, 64, 131_072


def test_a_million_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 64 tokens. Only FlashMLA, which pads 16 heads to 64, gets its rows in chunks."""
    monkeypatch.setattr(cases, "WIDTH", cases.LATENT)
    layout = Layout.packed(tuple(range(0, ROWS + 1, LENGTH)))
    case = Case("", "sparse", 16, 16, LENGTH, BF16)
    backend, generator = CudnnBackend(case.config(qk_pos_emb_head_dim=0)), torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=DEVICE)

    attention = AttentionInputs(normal(ROWS, 16, cases.LATENT), normal(ROWS, cases.LATENT), cases.LATENT**-0.5)
    weights = normal(ROWS, 16, dtype=torch.float32) * (16 * 128) ** -0.5
    leaves = (x.requires_grad_() for x in (normal(ROWS, 16, 128), normal(ROWS, 128), weights))
    indexer = IndexerInputs(*leaves)
    topk = backend.select(indexer, layout, LENGTH)
    ids = frontend.pad_topk(topk.indices_TK)
    parts = [
        frontend.sparse_forward(q, attention.kv_SD, i, n, attention.scale, cases.LATENT)
        for q, i, n in zip(*(x.split(CHUNK) for x in (attention.q_THD, ids, topk.length_T)), strict=True)
    ]
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    del parts
    operands = (attention.q_THD, attention.kv_SD, out, out, lse)
    dq, dkv = frontend.sparse_backward(operands, ids, topk.length_T, attention.scale)
    target = frontend.sparse_target(attention.q_THD, attention.kv_SD, lse, ids, topk.length_T, attention.scale)
    chunk = TeacherChunk((0, ROWS), None, target[:, :LENGTH])
    kl = backend.indexer_loss(indexer, [chunk], topk, layout, False)
    grads = torch.autograd.grad(0.37 * kl, [indexer.q_TID, indexer.k_SD, indexer.w_TI])
    for start in (0, ROWS // 2 // LENGTH * LENGTH, ROWS - LENGTH):
        rows = slice(start, start + LENGTH)
        few = Inputs(
            AttentionInputs(attention.q_THD[rows], attention.kv_SD[rows], attention.scale),
            IndexerInputs(indexer.q_TID[rows], indexer.k_SD[rows], indexer.w_TI[rows]),
            out[rows],
        )
        own = topk.indices_TK[rows]
        local = TopK(torch.where(own < 0, own, own - start), topk.length_T[rows], None)
        want, _, wanted = run(ReferenceBackend(backend.config), few.double(), local, Layout.causal(1, LENGTH), "sparse")
        assert cases.relative_error(out[rows], want.out_THV) < OUT_TOLERANCE
        for got, reference in zip((dq, dkv), wanted[:2], strict=True):
            assert cases.relative_error(got[rows], reference) < ATTENTION_GRAD_TOLERANCE
        for got, reference in zip(grads, wanted[2:], strict=True):
            assert cases.relative_error(got[rows], reference) < INDEXER_GRAD_TOLERANCE


def dense_loss(case: Case, length: int, budget: int) -> tuple[Tensor, tuple[Tensor, ...], int]:
    """KL sum, the indexer's gradients, and the peak of memory beyond operands, outputs and what is linear in length."""
    layout = Layout.causal(1, length)
    backend, inputs = CudnnBackend(case.config(), budget), cases.make_inputs(layout, case, DEVICE, draw_on=DEVICE)
    topk = backend.select(inputs.indexer, layout, case.k)
    with torch.no_grad():
        attended = Attended(*backend.attend(inputs.attention, topk, layout))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kl = cases.kl_sum(backend, inputs, attended, topk, layout, True)
    grads = torch.autograd.grad(kl, inputs.leaves()[2:])
    linear = 3 * sum(x.nbytes for x in inputs.leaves()) + length * 2**13
    return kl.detach(), grads, torch.cuda.max_memory_allocated() - before - linear


@pytest.mark.parametrize("length", [8192, 16384, 32768, 65536])
@pytest.mark.parametrize("heads", [16, 64])
def test_dense_loss_memory_grows_with_the_length_and_not_its_square(heads: int, length: int) -> None:
    """Beyond operands and gradients (linear), a chunk's matrices: half of the byte budget, whatever the length."""
    budget = 256 * MIB
    assert dense_loss(Case("", "dense", heads, heads, 64, BF16), length, budget)[2] < budget


def test_a_dense_loss_in_chunks_equals_one_in_a_piece() -> None:
    case = Case("", "dense", 64, 64, 64, BF16)
    whole, whole_grads, _ = dense_loss(case, 8192, BYTE_BUDGET)
    cut, cut_grads, _ = dense_loss(case, 8192, 64 * MIB)
    assert float(cut) == pytest.approx(float(whole), rel=KL_TOLERANCE)
    for one, other in zip(whole_grads, cut_grads, strict=True):
        assert cases.relative_error(other, one) < INDEXER_GRAD_TOLERANCE


def test_without_the_loss_nothing_of_it_is_kept() -> None:
    """128K tokens with GLM's head counts: what is saved are the attention's own operands, outputs and ids."""
    layout, case = Layout.causal(1, 131072), Case("", "off", 64, 32, 2048, BF16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, DEVICE, draw_on=DEVICE)
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        topk = backend.select(inputs.indexer, layout, case.k)
        attended = backend.attend(inputs.attention, topk, layout)
    assert topk.scores_TK is None
    kept = (inputs.attention.q_THD, inputs.attention.kv_SD, *attended, topk.indices_TK, topk.length_T)
    assert sum(saved) == sum(x.nbytes for x in kept)


# Rows that see few keys, and rows that see more than k: the FP64 reference keeps [rows, heads, keys].
WIDE = [
    Case("", loss, heads, (16, 32, 64)[i % 3], k, BF16)
    for i, (heads, k, loss) in enumerate(product((64, 96, 128), cases.LONG_TOPK, cases.LOSSES[1:]))
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_many_heads_and_many_keys(case: Case) -> None:
    whole, stage = Layout.packed((0, 300, 3000)), Stage(DEVICE, None)
    for rows in ((250, 350), (2900, 3000)):
        check_case(CudnnBackend(case.config()), case, whole.slice_rows(*rows), stage)
