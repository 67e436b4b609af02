"""Every registered backend against the FP64 reference, over one table: outputs, lse, sets, loss, five gradients.

The reference gets the numbers that the kernels see (BF16 operands), so tolerances are those of the kernels' own
rounding; they are named below, with what a real H200 measures. Unselected keys hold NaN in the attention, scores past
a row's length hold NaN, and the reference attends to the backend's own selection, so that near-ties of FP32 and FP64
scores do not show.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends import backend_names, resolve
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import AttentionInputs, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from . import cases
from .cases import Case, Inputs
from .conftest import Stage

# Relative errors in norm. BF16 results round to 2^-9 at most (about 1.2e-3 in norm); probabilities and logit gradients
# are rounded to BF16 inside the kernels as well.
OUT_TOLERANCE = 4e-3
ATTENTION_GRAD_TOLERANCE = 6e-3
# At logits of +-80 nearly all mass sits on one key, and a gradient is the small difference of two BF16-rounded terms.
LARGE_LOGIT_TOLERANCE = 2e-2
# BF16 head weights and BF16 score gradients inside, BF16 results.
INDEXER_GRAD_TOLERANCE = 8e-3
# FP32 sums of exact BF16 products.
LSE_TOLERANCE = 1e-5
SCORE_TOLERANCE = 1e-5
KL_TOLERANCE = 1e-4


def select_and_check(backend, inputs: Inputs, layout: Layout, k: int) -> TopK:
    topk = backend.select(inputs.indexer, layout, k)
    starts, ends = row_bounds(layout, inputs.dout.device)
    length = (ends - starts).clamp(max=k)
    assert topk.indices_TK.dtype == topk.length_T.dtype == torch.int32
    assert torch.equal(topk.length_T, length)
    ids, slots = topk.indices_TK, torch.arange(k, device=length.device)
    chosen = slots < length[:, None]
    assert torch.equal(ids >= 0, chosen)
    inside = (ids >= starts[:, None]) & (ids < ends[:, None])
    assert bool((inside | ~chosen).all())
    assert bool(((ids[:, 1:] > ids[:, :-1]) | ~chosen[:, 1:]).all()), "ids ascend"
    wanted = ReferenceBackend(backend.config).select(inputs.double().indexer, layout, k)
    assert wanted.scores_TK is not None
    got_scores = own_scores(inputs, ids).masked_fill(~chosen, 0.0).sort(-1).values
    best_scores = wanted.scores_TK.masked_fill(~chosen, 0.0).sort(-1).values
    assert torch.allclose(got_scores, best_scores, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
    if topk.scores_TK is not None:
        exact = own_scores(inputs, ids).masked_fill(~chosen, 0.0)
        found = topk.scores_TK.double().masked_fill(~chosen, 0.0)
        assert torch.allclose(found, exact, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE)
    return topk


def own_scores(inputs: Inputs, ids: torch.Tensor) -> torch.Tensor:
    """FP64 scores of the given ids, from operands rounded to BF16."""
    q, k = (x.detach().to(torch.bfloat16).double() for x in (inputs.indexer.q_TID, inputs.indexer.k_SD))
    dots = torch.einsum("tid,tkd->tik", q, k[ids.clamp(min=0).long()]).relu()
    return torch.einsum("ti,tik->tk", inputs.indexer.w_TI.detach().double(), dots)


def poisoned(inputs: Inputs, topk: TopK) -> Inputs:
    """NaN in every latent key that no row selects."""
    kv = inputs.attention.kv_SD.detach().clone()
    used = torch.zeros(kv.shape[0], dtype=torch.bool, device=kv.device)
    used[topk.indices_TK[topk.indices_TK >= 0].long()] = True
    kv[~used] = torch.nan
    attention = AttentionInputs(inputs.attention.q_THD, kv.requires_grad_(), inputs.attention.scale)
    return Inputs(attention, inputs.indexer, inputs.dout)


def run(backend, inputs: Inputs, topk: TopK, layout: Layout, loss: str):
    attended = backend.attend(inputs.attention, topk, layout)
    kl = None
    objective = (attended.out_THV * inputs.dout).sum()
    if loss != "off":
        kl = cases.kl_sum(backend, inputs, attended, topk, layout, loss == "dense")
        objective = objective.double() + 0.37 * kl
    grads = torch.autograd.grad(objective, inputs.leaves(), allow_unused=True)
    if loss != "off":  # a layout without valid rows may leave the indexer out of the graph
        pairs = zip(grads, inputs.leaves(), strict=True)
        grads = tuple(torch.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs)
    return attended, kl, grads


def check_case(backend, case: Case, layout: Layout, stage: Stage, logit_scale: float = 1.0) -> None:
    inputs = cases.make_inputs(layout, case, stage.device, logit_scale=logit_scale)
    topk = select_and_check(backend, inputs, layout, case.k)
    if case.loss != "dense":
        inputs = poisoned(inputs, topk)
    attended, kl, grads = run(backend, inputs, cases.garbage_past_length(topk), layout, case.loss)
    wanted = inputs.double()
    reference = ReferenceBackend(case.config())
    wanted_attended, wanted_kl, wanted_grads = run(reference, wanted, topk, layout, case.loss)

    assert cases.relative_error(attended.out_THV, wanted_attended.out_THV) < OUT_TOLERANCE
    empty = topk.length_T == 0
    assert bool((attended.out_THV[empty] == 0).all()) and bool(torch.isposinf(attended.lse_TH[empty]).all())
    assert torch.allclose(
        attended.lse_TH[~empty].double(), wanted_attended.lse_TH[~empty], rtol=LSE_TOLERANCE, atol=10 * LSE_TOLERANCE
    )
    if kl is not None:
        assert float(kl.detach()) == pytest.approx(
            float(wanted_kl.detach()), rel=KL_TOLERANCE, abs=KL_TOLERANCE * layout.num_rows
        )
    names = ("dq", "dkv", "dq_indexer", "dk_indexer", "dw_indexer")
    for name, got, want, leaf in zip(names, grads, wanted_grads, inputs.leaves(), strict=True):
        attention = name in ("dq", "dkv")
        if case.loss == "off" and not attention:
            assert got is None
            continue
        assert got.dtype == leaf.dtype
        if name == "dq":
            assert bool((got[empty] == 0).all())
        tolerance = INDEXER_GRAD_TOLERANCE
        if attention:
            tolerance = ATTENTION_GRAD_TOLERANCE if logit_scale == 1.0 else LARGE_LOGIT_TOLERANCE
        # A one-key row has no KL gradient: both sides are then rounding of zero.
        floor = 0.0 if attention else 1e-6 * layout.num_rows
        error = cases.relative_error(got, want)
        assert error < tolerance or float((got.double() - want).norm()) < floor, (name, error)


# The reference differs from itself only in precision: one cell a layout is enough to see its chunks and its rounding.
RUNS = [("cudnn", case) for case in cases.table()] + [("none", case) for case in cases.table()[:: len(cases.HEADS)]]


def test_every_backend_is_in_the_suite() -> None:
    assert {name for name, _ in RUNS} == set(backend_names())


@pytest.mark.parametrize(("name", "case"), RUNS, ids=str)
def test_backend_equals_the_reference(name: str, case: Case, stage: Stage) -> None:
    backend = resolve(name)(case.config(kernel_backend=name))
    for layout in case.layouts():
        check_case(backend, case, layout, stage)


# The FP64 reference keeps [rows, heads, keys] for its backward: few heads at these lengths.
LONG = [c for c in cases.table(cases.LONG_TOPK, cases.LONG_DOCUMENTS) if c.heads <= 32]


@pytest.mark.gpu_long
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_documents(case: Case) -> None:
    stage = Stage(torch.device("cuda", torch.cuda.current_device()), None)
    for layout in case.layouts():
        check_case(resolve("cudnn")(case.config()), case, layout, stage)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("loss", cases.LOSSES)
@pytest.mark.parametrize("heads", [16, 64])
def test_large_logits(loss: str, heads: int, stage: Stage) -> None:
    """Logits of about +-80: probabilities underflow, and softmax must not overflow."""
    case = Case("packed", loss, heads, 32, 64, torch.bfloat16)
    backend = resolve("cudnn")(case.config())
    check_case(backend, case, case.layouts()[0], stage, logit_scale=20.0)


@pytest.mark.parametrize("loss", cases.LOSSES)
@pytest.mark.parametrize("keys", [0, 40])
def test_no_rows(keys: int, loss: str, stage: Stage) -> None:
    """Every verb gives empty tensors and zero gradients of the keys, and launches nothing."""
    case, layout = Case("packed", loss, 16, 32, 64, torch.bfloat16), Layout(0, keys, ())
    check_case(resolve("cudnn")(case.config()), case, layout, stage)
    assert stage.emulator is None or not stage.emulator.calls


def test_the_table_meets_every_pair_of_values() -> None:
    """All pairs of all columns but k and carrier, whose pairs with each other and with the rest are met as well."""
    rows = [(c.layout, c.loss, c.heads, c.index_heads, c.k, c.carrier) for c in cases.table()]
    columns = list(zip(*rows, strict=True))
    for first, second in combinations(range(len(columns)), 2):
        met = Counter((row[first], row[second]) for row in rows)
        wanted = len(set(columns[first])) * len(set(columns[second]))
        assert len(met) == wanted, (first, second, len(met), wanted)
    assert 50 <= len(rows) <= 70
