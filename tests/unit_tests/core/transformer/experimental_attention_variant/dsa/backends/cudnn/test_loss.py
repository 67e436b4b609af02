"""The KL loss beyond the table: when kernels run, how gradients scale, chunks, the floor, tensor-parallel teachers."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.scoring import BYTE_BUDGET
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    Attended,
    AttentionInputs,
    IndexerInputs,
    TeacherChunk,
    TopK,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds, visible_keys
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend, kl_divergence

from .. import cases
from ..cases import Case, Inputs
from ..conftest import Stage
from ..emulator import Emulator
from ..test_backends import INDEXER_GRAD_TOLERANCE, KL_TOLERANCE, run

CPU = torch.device("cpu")
LAYOUT = Layout.packed((0, 30, 100))


def backend_and_inputs(loss: str, device: torch.device, layout: Layout = LAYOUT, heads: int = 16, **changes):
    case = Case("packed", loss, heads, 32, 32, torch.bfloat16)
    backend = CudnnBackend(case.config(**changes))
    inputs = cases.make_inputs(layout, case, device)
    return backend, inputs, backend.select(inputs.indexer, layout, 32)


def test_sparse_gradients_run_in_backward_and_once_under_recompute(emulated: Emulator) -> None:
    backend, inputs, topk = backend_and_inputs("sparse", CPU)

    def layer(q: torch.Tensor) -> torch.Tensor:
        attention = AttentionInputs(q, inputs.attention.kv_SD, inputs.attention.scale)
        attended = backend.attend(attention, topk, LAYOUT)
        kl = cases.kl_sum(backend, Inputs(attention, inputs.indexer, inputs.dout), attended, topk, LAYOUT, False)
        return attended.out_THV.float().sum() + kl

    loss = checkpoint(layer, inputs.attention.q_THD, use_reentrant=False)
    assert emulated.calls["indexer_backward"] == 0 and emulated.calls["sparse_target"] == 1
    loss.backward()
    assert emulated.calls["indexer_backward"] == 1
    assert emulated.calls["sparse_backward"] == 1 and emulated.calls["sparse_target"] == 2


def test_the_attention_forward_never_runs_twice(emulated: Emulator) -> None:
    for loss in ("sparse", "dense"):
        backend, inputs, topk = backend_and_inputs(loss, CPU)
        before = emulated.calls["flash_mla"]
        run(backend, inputs, topk, LAYOUT, loss)
        assert emulated.calls["flash_mla"] == before + 1


def test_without_the_loss_none_of_its_kernels_runs(emulated: Emulator) -> None:
    backend, inputs, topk = backend_and_inputs("off", CPU)
    run(backend, inputs, topk, LAYOUT, "off")
    assert set(emulated.calls) == {"indexer_forward", "indexer_top_k", "flash_mla", "sparse_backward"}


def test_without_gradients_the_dense_loss_computes_none(emulated: Emulator) -> None:
    backend, inputs, topk = backend_and_inputs("dense", CPU)
    with torch.no_grad():
        attended = backend.attend(inputs.attention, topk, LAYOUT)
        cases.kl_sum(backend, inputs, attended, topk, LAYOUT, True)
    assert emulated.calls["dense_indexer_backward"] == 0 and emulated.calls["dense_target"] > 0


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_gradients_scale_with_what_comes_from_above(loss: str, stage: Stage) -> None:
    backend, inputs, topk = backend_and_inputs(loss, stage.device)
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, topk, LAYOUT)))
    leaves = [inputs.indexer.q_TID, inputs.indexer.k_SD, inputs.indexer.w_TI]
    kl = cases.kl_sum(backend, inputs, attended, topk, LAYOUT, loss == "dense")
    once = torch.autograd.grad(kl, leaves, retain_graph=True)
    again = torch.autograd.grad(kl, leaves, retain_graph=True)
    scaled = torch.autograd.grad(kl * 1e-3, leaves)
    for one, same, small in zip(once, again, scaled, strict=True):
        assert cases.relative_error(same, one) < INDEXER_GRAD_TOLERANCE, "backward twice"
        assert cases.relative_error(small.double() * 1e3, one) < INDEXER_GRAD_TOLERANCE


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_chunks_add_up(loss: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows, each scaled by its own row count in the kernels, give the whole loss and gradients."""
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import loss as loss_module

    layout = Layout.packed((0, 90, 300))
    backend, inputs, topk = backend_and_inputs(loss, stage.device, layout)
    _, whole, grads = run(backend, inputs, topk, layout, loss)
    monkeypatch.setattr(loss_module, "_sparse_rows", lambda width: 37)
    cut = CudnnBackend(backend.config, 24 * 20000)
    if stage.emulator is not None:
        before = stage.emulator.calls["indexer_backward"] + stage.emulator.calls["dense_target"]
    _, parts, part_grads = run(cut, inputs, topk, layout, loss)
    if stage.emulator is not None:
        after = stage.emulator.calls["indexer_backward"] + stage.emulator.calls["dense_target"]
        assert after - before > 3
    assert float(parts.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    for one, other in zip(grads[2:], part_grads[2:], strict=True):
        assert cases.relative_error(other, one) < INDEXER_GRAD_TOLERANCE


def test_a_dense_chunk_holds_the_keys_of_its_own_rows_alone(stage: Stage) -> None:
    layout = Layout.packed((0, 90, 300))
    backend, inputs, topk = backend_and_inputs("dense", stage.device, layout)
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, topk, layout)))
    starts, ends = (x.tolist() for x in row_bounds(layout, stage.device))
    for budget, least in ((BYTE_BUDGET, 1), (24 * 20000, 4)):
        chunks = list(CudnnBackend(backend.config, budget).teacher(inputs.attention, attended, topk, layout, True))
        assert len(chunks) >= least
        for chunk in chunks:
            rows = slice(*chunk.rows)
            assert chunk.keys == (min(starts[rows]), max(ends[rows]))
            assert chunk.target_RN.shape == (rows.stop - rows.start, chunk.keys[1] - chunk.keys[0])


@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_nan_in_keys_that_no_row_reads(loss: str, stage: Stage) -> None:
    """Indexer and latent keys: padding never counts; what no row selects counts in the dense loss alone."""
    layout, k = Layout.packed((0, 30, 130), (0, 48, 160)), 4
    backend, inputs, _ = backend_and_inputs(loss, stage.device, layout)
    topk = backend.select(inputs.indexer, layout, k)
    _, kl, grads = run(backend, inputs, topk, layout, loss)
    visible = visible_keys(layout, stage.device)
    padding = poisoned(inputs, visible)
    assert torch.equal(backend.select(padding.indexer, layout, k).indices_TK, topk.indices_TK)
    read = visible
    if loss == "sparse":
        read = torch.zeros_like(visible)
        read[topk.indices_TK[topk.indices_TK >= 0].long()] = True
        assert bool((visible & ~read).any())
    _, dirty_kl, dirty = run(backend, poisoned(inputs, read), cases.garbage_past_length(topk), layout, loss)
    assert float(dirty_kl.detach()) == pytest.approx(float(kl.detach()), rel=1e-6)
    for one, other in zip(grads, dirty, strict=True):
        assert cases.relative_error(other, one) < INDEXER_GRAD_TOLERANCE
    assert not bool(dirty[1][~read].any() or dirty[3][~read].any())


def poisoned(inputs: Inputs, read: torch.Tensor) -> Inputs:
    """NaN in every key that ``read`` leaves out."""
    kv, k = (x.detach().masked_fill(~read[:, None], torch.nan).requires_grad_() for x in
             (inputs.attention.kv_SD, inputs.indexer.k_SD))  # fmt: skip
    attention = AttentionInputs(inputs.attention.q_THD, kv, inputs.attention.scale)
    return Inputs(attention, IndexerInputs(inputs.indexer.q_TID, k, inputs.indexer.w_TI), inputs.dout)


@pytest.mark.parametrize("garbage", [7, 2**31 - 1])
def test_ids_past_the_length_reach_neither_target_nor_gradients(garbage: int, stage: Stage) -> None:
    """The teacher goes by lengths. The backward kernel takes none, so there an id must at least exist."""
    backend, inputs, topk = backend_and_inputs("sparse", stage.device)
    length = topk.length_T.clamp(max=9)
    past = torch.arange(32, device=stage.device) >= length[:, None]
    clean = topk._replace(indices_TK=topk.indices_TK.masked_fill(past, -1), length_T=length)
    dirty = cases.garbage_past_length(clean)._replace(indices_TK=topk.indices_TK.masked_fill(past, garbage))
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, clean, LAYOUT)))
    targets = [next(iter(backend.teacher(inputs.attention, attended, x, LAYOUT, False))) for x in (clean, dirty)]
    assert torch.equal(targets[0].target_RN.masked_fill(past, 0.0), targets[1].target_RN.masked_fill(past, 0.0))
    if garbage < LAYOUT.num_keys:
        _, kl, grads = run(backend, inputs, clean, LAYOUT, "sparse")
        _, dirty_kl, dirty_grads = run(backend, inputs, dirty, LAYOUT, "sparse")
        assert float(dirty_kl.detach()) == pytest.approx(float(kl.detach()), rel=1e-6)
        for one, other in zip(grads, dirty_grads, strict=True):
            assert cases.relative_error(other, one) < INDEXER_GRAD_TOLERANCE


@pytest.mark.parametrize("loss", ["sparse", "dense"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_teachers(loss: str, ranks: int, stage: Stage) -> None:
    """Heads split over ranks: the ranks' teachers sum to the whole one, rank 0's rows first, in equally many chunks."""
    layout = Layout.packed((0, 37, 120))
    heads = 32
    dense = loss == "dense"
    backend, inputs, topk = backend_and_inputs(loss, stage.device, layout, heads)
    attended = Attended(*(x.detach() for x in backend.attend(inputs.attention, topk, layout)))
    sharded = CudnnBackend(
        cases.make_config(num_attention_heads=heads, tensor_model_parallel_size=ranks, topk=32), 24 * 12000
    )
    share, rows = heads // ranks, layout.num_rows // ranks
    chunks = []
    for rank in range(ranks):
        own = slice(rank * share, (rank + 1) * share)
        attention = AttentionInputs(inputs.attention.q_THD[:, own], inputs.attention.kv_SD, inputs.attention.scale)
        partial = Attended(attended.out_THV[:, own], attended.lse_TH[:, own])
        chunks.append(list(sharded.teacher(attention, partial, topk, layout, dense)))
    assert len({len(chunk) for chunk in chunks}) == 1
    total = torch.zeros((), device=stage.device)
    for parts in zip(*chunks, strict=True):
        (start, stop), keys = parts[0].rows, parts[0].keys
        assert all(part.rows == (start, stop) and part.keys == keys for part in parts)
        summed = torch.stack([part.target_RN for part in parts]).sum(0).view(ranks, stop - start, -1)
        for rank in range(ranks):
            own = rank * rows, (rank + 1) * rows
            target = TeacherChunk((start, stop), keys, summed[rank].contiguous())
            total = total + backend.indexer_loss(
                inputs.indexer.rows(*own), [target], topk.rows(*own), layout.slice_rows(*own), dense
            )
    whole = cases.kl_sum(backend, inputs, attended, topk, layout, dense)
    assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=KL_TOLERANCE)


def small_problem(scores: torch.Tensor, device: torch.device) -> tuple[IndexerInputs, TopK, Layout]:
    """One row whose index scores are as given: head 0 reads coordinate 0 of each key."""
    keys = scores.numel()
    q = torch.zeros(1, 32, 128, device=device)
    q[0, 0, 0] = 1.0
    k = torch.zeros(keys, 128, device=device)
    k[:, 0] = scores.to(device)
    w = torch.zeros(1, 32, device=device)
    w[0, 0] = 1.0
    layout = Layout.causal(1, keys).slice_rows(keys - 1, keys)
    indices = torch.full((1, 32), -1, dtype=torch.int32, device=device)
    indices[0, :keys] = torch.arange(keys, device=device)
    operands = IndexerInputs(*(x.requires_grad_() for x in (q, k, w)))
    return operands, TopK(indices, torch.tensor([keys], dtype=torch.int32, device=device), None), layout


@pytest.mark.parametrize("gap", [90.0, 96.0, 104.0, 152.0], ids=str)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_the_log_prediction_is_floored_as_in_the_reference(gap: float, dense: bool, stage: Stage) -> None:
    """Half of the teacher's mass on a key that the student gives e^-gap, on both sides of the floor."""
    operands, topk, layout = small_problem(torch.tensor([gap, 0.0, 1.0]), stage.device)
    target = torch.tensor([[0.25, 0.5, 0.25]], device=stage.device)
    backend = CudnnBackend(cases.make_config(topk=32, loss_coeff=0.1, use_sparse_loss=not dense))
    columns = target if dense else torch.nn.functional.pad(target, (0, 29))
    chunk = TeacherChunk((0, 1), (0, 3) if dense else None, columns.clone())
    kl = backend.indexer_loss(operands, [chunk], topk, layout, dense)
    scores = operands.k_SD.detach()[:, 0].double()[None].requires_grad_()
    wanted = kl_divergence(target.double(), scores, torch.ones(1, 3, dtype=torch.bool, device=stage.device))
    assert float(kl.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    (dk,) = torch.autograd.grad(kl, [operands.k_SD])
    (dscores,) = torch.autograd.grad(wanted, [scores])
    # A key of score 0 gets no gradient through ReLU.
    open_keys = operands.k_SD.detach()[:, 0] > 0
    assert torch.allclose(dk[open_keys, 0].double(), dscores[0][open_keys], atol=5e-3)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_teacher_without_mass_teaches_nothing(dense: bool, stage: Stage) -> None:
    operands, topk, layout = small_problem(torch.tensor([1.0, 2.0, 3.0]), stage.device)
    target = torch.zeros(1, 3 if dense else 32, device=stage.device)
    backend = CudnnBackend(cases.make_config(topk=32, loss_coeff=0.1, use_sparse_loss=not dense))
    chunk = TeacherChunk((0, 1), (0, 3) if dense else None, target)
    kl = backend.indexer_loss(operands, [chunk], topk, layout, dense)
    (dk,) = torch.autograd.grad(kl, [operands.k_SD])
    assert float(kl.detach()) == 0.0 and float(dk.abs().max()) < 1e-30


def test_opposite_heads_are_summed_before_normalizing(stage: Stage) -> None:
    """Two heads with opposite preferences: a wrong denominator cancels with one head, and shows with two."""
    layout = Layout.causal(1, 16).slice_rows(15, 16)
    case = Case("packed", "sparse", 2, 32, 4, torch.bfloat16)
    inputs = cases.make_inputs(layout, case, stage.device, logit_scale=8.0)
    backend = CudnnBackend(case.config())
    topk = backend.select(inputs.indexer, layout, 4)
    _, kl, _ = run(backend, inputs, topk, layout, "sparse")
    _, wanted, _ = run(ReferenceBackend(case.config()), inputs.double(), topk, layout, "sparse")
    assert float(kl.detach()) == pytest.approx(float(wanted.detach()), rel=1e-3)


def test_replay_trains_the_indexer_too(stage: Stage) -> None:
    backend, inputs, topk = backend_and_inputs("sparse", stage.device)
    _, kept, grads = run(backend, inputs, topk, LAYOUT, "sparse")
    _, replayed, replayed_grads = run(backend, inputs, topk._replace(scores_TK=None), LAYOUT, "sparse")
    assert float(kept.detach()) == pytest.approx(float(replayed.detach()), rel=1e-6)
    for one, other in zip(grads[2:], replayed_grads[2:], strict=True):
        assert cases.relative_error(other, one) < INDEXER_GRAD_TOLERANCE
