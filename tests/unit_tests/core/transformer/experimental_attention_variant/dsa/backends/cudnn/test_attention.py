"""Sparse attention beyond the table: every head count, more than a kernel takes, index contracts, popular keys."""

import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import AttentionInputs, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend

from .. import cases, emulator
from ..cases import Case
from ..conftest import Stage
from ..emulator import Emulator
from ..test_backends import (
    ATTENTION_GRAD_TOLERANCE,
    INDEXER_GRAD_TOLERANCE,
    KL_TOLERANCE,
    LARGE_LOGIT_TOLERANCE,
    OUT_TOLERANCE,
    check_case,
    run,
)


def compare(stage: Stage, heads: int, topk: TopK, layout: Layout, logit_scale: float = 1.0) -> None:
    case = Case("packed", "off", heads, 32, topk.indices_TK.shape[1], torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device, logit_scale=logit_scale)
    got, _, grads = run(CudnnBackend(case.config()), inputs, topk, layout, "off")
    want, _, wanted_grads = run(ReferenceBackend(case.config()), inputs.double(), topk, layout, "off")
    assert cases.relative_error(got.out_THV, want.out_THV) < OUT_TOLERANCE
    for mine, theirs in zip(grads[:2], wanted_grads[:2], strict=True):
        if logit_scale != 1.0:
            assert cases.relative_error(mine, theirs) < LARGE_LOGIT_TOLERANCE
            continue
        assert cases.relative_error(mine, theirs) < ATTENTION_GRAD_TOLERANCE
        # A wrong tile once gave gradients of 1e11 that pointed somewhere: look at the size as well.
        assert float(mine.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.05)


@pytest.mark.parametrize("heads", [1, 8, 48, 65, 129, 192])
@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_any_number_of_heads(heads: int, loss: str, stage: Stage) -> None:
    case = Case("packed", loss, heads, 16, 24, torch.bfloat16)
    check_case(CudnnBackend(case.config()), case, Layout.packed((0, 7, 40)), stage)


@pytest.mark.parametrize("build", ["sgl-flash-mla", "upstream"])
@pytest.mark.parametrize(("heads", "loss"), [(16, "sparse"), (129, "off"), (64, "dense")])
def test_every_build_of_flash_mla(build: str, heads: int, loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(torch.device("cpu"), emulator.install(monkeypatch, build))
    case = Case("packed", loss, heads, 16, 24, torch.bfloat16)
    check_case(CudnnBackend(case.config()), case, Layout.packed((0, 7, 40)), stage)


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_without_a_rotary_part(loss: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are the latent alone, 512 wide."""
    monkeypatch.setattr(cases, "WIDTH", cases.LATENT)
    monkeypatch.setattr(cases, "ROPE", 0)
    case = Case("packed", loss, 64, 16, 64, torch.bfloat16)
    check_case(CudnnBackend(case.config()), case, Layout.packed((0, 7, 40)), stage)


def popular_keys(rows: int, k: int, disjoint: bool, device: torch.device) -> TopK:
    """Keys that dozens of rows share, or neighbours that share none."""
    generator = torch.Generator().manual_seed(1)
    columns = []
    for row in range(rows):
        pool = torch.arange(row % 4, rows, 4) if disjoint else torch.arange(min(rows, 3 * k // 2))
        columns.append(pool[torch.randperm(pool.numel(), generator=generator)[:k]].sort().values)
    indices = torch.stack(columns).int().to(device)
    return TopK(indices, torch.full((rows,), k, dtype=torch.int32, device=device), None)


@pytest.mark.parametrize("disjoint", [False, True], ids=["popular", "disjoint"])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_popular_keys(heads: int, disjoint: bool, stage: Stage) -> None:
    rows = 256 if stage.emulator is None else 80
    # The layout only says which keys the reference may look at.
    layout = Layout.causal(1, 2 * rows).slice_rows(rows, 2 * rows)
    compare(stage, heads, popular_keys(rows, rows // 4, disjoint, stage.device), layout)


@pytest.mark.parametrize("logit_scale", [1.0, 20.0], ids=["", "large logits"])
@pytest.mark.parametrize("counts", [(0, 1, 63, 64, 65, 128, 0), (0, 2047, 1, 0)], ids=str)
def test_rows_with_few_or_no_keys(counts: tuple[int, ...], logit_scale: float, stage: Stage) -> None:
    most = -(-max(counts) // 128) * 128
    layout = Layout.causal(1, 2 * most).slice_rows(most, most + len(counts))
    indices = torch.full((len(counts), most), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        indices[row, :count] = torch.arange(count)
    length = torch.tensor(counts, dtype=torch.int32)
    topk = TopK(indices.to(stage.device), length.to(stage.device), None)
    compare(stage, 16, topk, layout, logit_scale)
    case = Case("packed", "off", 16, 32, most, torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device, logit_scale=logit_scale)
    attended, _, grads = run(CudnnBackend(case.config()), inputs, topk, layout, "off")
    empty = length == 0
    assert bool((attended.out_THV[empty] == 0).all() and (grads[0][empty] == 0).all())
    kept = [row for row, count in enumerate(counts) if count]
    attention = AttentionInputs(inputs.attention.q_THD[kept], inputs.attention.kv_SD, inputs.attention.scale)
    fewer = TopK(topk.indices_TK[kept], topk.length_T[kept], None)
    out = CudnnBackend(case.config()).attend(attention, fewer, layout).out_THV
    (dkv,) = torch.autograd.grad((out * inputs.dout[kept]).sum(), [inputs.attention.kv_SD])
    assert cases.relative_error(grads[1], dkv) < ATTENTION_GRAD_TOLERANCE, "empty rows give keys no gradient"


def test_what_lies_past_the_length_is_not_read(stage: Stage) -> None:
    """Before the length there are no holes: a selection's ids ascend, then -1, and so do replayed ones."""
    layout = Layout.causal(1, 128)
    case = Case("packed", "off", 64, 32, 128, torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device)
    backend = CudnnBackend(case.config())
    topk = backend.select(inputs.indexer, layout, 128)
    length = topk.length_T.clamp(max=40)
    cut = topk.indices_TK.masked_fill(torch.arange(128, device=stage.device) >= length[:, None], -1)
    clean = run(backend, inputs, TopK(cut, length, None), layout, "off")
    for garbage in (2**31 - 1, 7):
        dirty = cut.masked_fill(cut < 0, garbage)
        got = run(backend, inputs, TopK(dirty, length, None), layout, "off")
        assert torch.equal(got[0].out_THV, clean[0].out_THV) and torch.equal(got[0].lse_TH, clean[0].lse_TH)
        assert cases.relative_error(got[2][1], clean[2][1]) < ATTENTION_GRAD_TOLERANCE


@pytest.mark.parametrize("heads", [64, 128])
def test_nothing_is_copied_on_the_way_to_the_kernels(heads: int, emulated: Emulator) -> None:
    """BF16 operands with a head count that kernels take: q, kv, output and its gradient are handed over as they lie."""
    layout, case = Layout.causal(1, 40), Case("packed", "off", heads, 32, 24, torch.bfloat16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, torch.device("cpu"))
    q, kv = inputs.leaves()[:2]
    attended = backend.attend(inputs.attention, backend.select(inputs.indexer, layout, 24), layout)
    torch.autograd.grad(attended.out_THV, [q, kv], grad_outputs=inputs.dout)
    operands = emulator.addresses(q=q, kv=kv)
    saved = emulator.addresses(out=attended.out_THV, dout=inputs.dout, lse=attended.lse_TH)
    assert emulated.handed == {"flash_mla": operands, "sparse_backward": operands | saved}


@pytest.mark.parametrize("loss", ["sparse", "dense"])
@pytest.mark.parametrize("start", [1, 3])
def test_rows_from_any_offset(start: int, loss: str, stage: Stage) -> None:
    """Row slices begin at addresses that kernels for aligned tensors refuse."""
    layout, case = Layout.packed((0, 40, 90)), Case("packed", loss, 64, 16, 32, torch.bfloat16)
    backend, whole = CudnnBackend(case.config()), cases.make_inputs(layout, case, stage.device)
    topk = backend.select(whole.indexer, layout, 32)
    inputs, part, sliced = rows_of(whole, layout, topk, start, start + 71)
    assert sliced.length_T.data_ptr() % 16
    attended, kl, grads = run(backend, inputs, sliced, part, loss)
    want, wanted_kl, wanted = run(ReferenceBackend(case.config()), inputs.double(), sliced, part, loss)
    assert kl is not None and wanted_kl is not None
    assert cases.relative_error(attended.out_THV, want.out_THV) < OUT_TOLERANCE
    assert float(kl.detach()) == pytest.approx(float(wanted_kl.detach()), rel=KL_TOLERANCE)
    for got, reference in zip(grads, wanted, strict=True):
        assert cases.relative_error(got, reference) < INDEXER_GRAD_TOLERANCE


def rows_of(
    inputs: cases.Inputs, layout: Layout, topk: TopK, start: int, stop: int
) -> tuple[cases.Inputs, Layout, TopK]:
    """Rows ``[start, stop)`` of everything, as views that look at all keys."""
    attention = AttentionInputs(inputs.attention.q_THD[start:stop], inputs.attention.kv_SD, inputs.attention.scale)
    few = cases.Inputs(attention, inputs.indexer.rows(start, stop), inputs.dout[start:stop])
    scores = None if topk.scores_TK is None else topk.scores_TK[start:stop]
    sliced = TopK(topk.indices_TK[start:stop], topk.length_T[start:stop], scores)
    return few, layout.slice_rows(start, stop), sliced


def test_lse_is_natural(stage: Stage) -> None:
    """The lse of a one-key row is that key's logit, in units of e."""
    layout = Layout.causal(1, 1)
    case = Case("packed", "off", 64, 32, 64, torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device)
    backend = CudnnBackend(case.config())
    lse = backend.attend(inputs.attention, backend.select(inputs.indexer, layout, 64), layout).lse_TH[0]
    logit = (inputs.attention.q_THD[0].double() @ inputs.attention.kv_SD[0].double()) * inputs.attention.scale
    assert torch.allclose(lse.double(), logit, atol=1e-4)


def test_fp32_operands_are_rounded_and_get_fp32_gradients(stage: Stage) -> None:
    layout = Layout.causal(1, 70)
    case = Case("packed", "off", 64, 32, 64, torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device)
    backend = CudnnBackend(case.config())
    topk = backend.select(inputs.indexer, layout, 64)
    q = (inputs.attention.q_THD.detach().float() * (1 + 2**-11)).requires_grad_()
    kv = inputs.attention.kv_SD.detach().float().requires_grad_()
    out = backend.attend(AttentionInputs(q, kv, inputs.attention.scale), topk, layout).out_THV
    dq, dkv = torch.autograd.grad(out.sum(), [q, kv])
    assert out.dtype == dq.dtype == dkv.dtype == torch.float32
    assert torch.equal(out, backend.attend(inputs.attention, topk, layout).out_THV.float())


@pytest.mark.gpu_long
@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_more_rows_than_a_grid_dimension(rows: int) -> None:
    layout = Layout.packed(cases.offsets_of((64,) * (rows // 64) + (rows % 64,)))
    case = Case("packed", "sparse", 16, 16, 64, torch.bfloat16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, torch.device("cuda"))
    topk = backend.select(inputs.indexer, layout, 64)
    attended, kl, grads = run(backend, inputs, topk, layout, "sparse")
    for start, stop in ((0, 64), (rows // 64 * 64 - 64, rows)):
        few, part, sliced = rows_of(inputs, layout, topk, start, stop)
        want, _, wanted = run(ReferenceBackend(case.config()), few.double(), sliced, part, "sparse")
        assert cases.relative_error(attended.out_THV[start:stop], want.out_THV) < OUT_TOLERANCE
        assert cases.relative_error(grads[0][start:stop], wanted[0]) < ATTENTION_GRAD_TOLERANCE
    assert kl is not None and bool(torch.isfinite(kl)) and all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["off", "sparse", "dense"])
def test_nothing_waits_for_the_device(loss: str) -> None:
    """Once kernels are compiled, a step runs under the synchronization alarm, on a layout that nobody has seen yet."""
    device, case = torch.device("cuda"), Case("zigzag2", loss, 16, 32, 64, torch.bfloat16)
    backend = CudnnBackend(case.config())
    for number, alarm in enumerate(("default", "error", "error")):
        layout = cases.zigzag((71 - number, 201 + number), 2)[1]
        inputs = cases.make_inputs(layout, case, device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(alarm)
        try:
            run(backend, inputs, backend.select(inputs.indexer, layout, 64), layout, loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_a_side_stream_waits_for_its_own_producer(loss: str) -> None:
    """Operands arrive late on another stream than the default one: kernels launched elsewhere would read zeros."""
    device, layout = torch.device("cuda"), Layout.packed((0, 70, 200))
    case = Case("packed", loss, 16, 32, 64, torch.bfloat16)
    backend, inputs = CudnnBackend(case.config()), cases.make_inputs(layout, case, device)
    topk = backend.select(inputs.indexer, layout, 64)
    serial, kl, grads = run(backend, inputs, topk, layout, loss)
    late = cases.make_inputs(layout, case, device, seed=1)
    with torch.no_grad():
        for leaf in late.leaves():
            leaf.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for leaf, source in zip([*late.leaves(), late.dout], [*inputs.leaves(), inputs.dout], strict=True):
                leaf.copy_(source)
        selected = backend.select(late.indexer, layout, 64)
        attended, late_kl, late_grads = run(backend, late, selected, layout, loss)
    side.synchronize()
    assert kl is not None and late_kl is not None
    assert torch.equal(selected.indices_TK, topk.indices_TK)
    assert torch.equal(attended.out_THV, serial.out_THV) and torch.equal(attended.lse_TH, serial.lse_TH)
    assert float(late_kl.detach()) == pytest.approx(float(kl.detach()), rel=1e-6)
    for got, wanted in zip(late_grads, grads, strict=True):
        assert cases.relative_error(got, wanted) < INDEXER_GRAD_TOLERANCE
