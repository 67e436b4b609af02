"""The scoring choke point: what is rounded there, how a layout becomes calls, and where the 32-head leak ends."""

import ast
from pathlib import Path

import pytest
import torch

import megatron.core
import megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn as cudnn_backend
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.scoring import (
    BYTE_BUDGET,
    plan,
    score,
    segment_calls,
    to_operands,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, Segment, row_bounds

from .. import cases
from ..cases import Case
from ..conftest import Stage
from ..emulator import Emulator, shown_keys
from ..test_backends import check_case, run, select_and_check

CPU = torch.device("cpu")
BYTES = BYTE_BUDGET


def operands(layout: Layout, heads: int = 32, device: torch.device = CPU) -> IndexerInputs:
    case = Case("packed", "off", 16, heads, 64, torch.float32)
    return to_operands(cases.make_inputs(layout, case, device).indexer)


def callers(name: str) -> list[str]:
    """Files of the whole tree that call ``name``, once for each call."""
    found = []
    for path in Path(megatron.core.__file__).parents[1].rglob("*.py"):
        if name not in (source := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
                found.append(path.name)
    return found


def test_the_scoring_kernel_has_one_call_site() -> None:
    assert callers("indexer_forward_wrapper") == ["frontend.py"]
    assert callers("score_segments") == ["scoring.py"]


def test_operands_are_rounded_and_head_weights_are_not(stage: Stage) -> None:
    layout = Layout.causal(1, 64)
    case = Case("packed", "off", 16, 32, 64, torch.float32)
    carried = cases.make_inputs(layout, case, stage.device).indexer
    rounded = IndexerInputs(
        carried.q_TID.detach().bfloat16().float(), carried.k_SD.detach().bfloat16().float(), carried.w_TI
    )
    call = segment_calls(layout, stage.device)[0]
    exact, same = score(to_operands(carried), call), score(to_operands(rounded), call)
    assert torch.equal(exact, same)
    nudged = IndexerInputs(carried.q_TID, carried.k_SD, carried.w_TI * (1 + 2**-12))
    visible = torch.isfinite(exact)
    wanted = exact[visible].double() * (1 + 2**-12)  # BF16 would lose it
    assert cases.relative_error(score(to_operands(nudged), call)[visible], wanted) < 2e-6


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_calls_cover_every_valid_row_once_and_see_its_keys(name: str, emulated: Emulator) -> None:
    for layout in cases.LAYOUTS[name](cases.CI_DOCUMENTS):
        for budget in (BYTES, 12 * 5000, 1):
            check_plan(layout, budget)


def check_plan(layout: Layout, budget: int) -> None:
    starts, ends = row_bounds(layout, CPU)
    planned = plan(layout, CPU, budget)
    seen = torch.zeros(layout.num_rows, dtype=torch.int32)
    inputs = operands(layout)
    for call in planned.calls:
        seen[call.start : call.stop] += 1
        scores = score(inputs, call)
        rows = torch.arange(call.start, call.stop)
        for row in rows[ends[rows] > starts[rows]].tolist():
            visible = slice(int(starts[row]), int(ends[row]))
            wanted = exact_scores(inputs, row, visible)
            assert torch.allclose(scores[row - call.start, : wanted.numel()], wanted, rtol=1e-5, atol=1e-6)
    assert bool((seen[ends > starts] == 1).all()) and int(seen.max()) <= 1
    assert planned.covers_all_rows == bool((seen == 1).all() and planned.calls)


def exact_scores(inputs: IndexerInputs, row: int, keys: slice) -> torch.Tensor:
    dots = (inputs.q_TID[row].float() @ inputs.k_SD[keys].float().T).relu()
    return inputs.w_TI[row] @ dots


def test_the_default_byte_budget() -> None:
    assert BYTE_BUDGET == cudnn_backend.CudnnBackend(cases.make_config()).byte_budget == 2 * 2**30


def test_a_call_stays_within_the_byte_budget() -> None:
    budget = 12 * 2**20
    for layout in (Layout.causal(1, 40000), Layout.packed((0, 300, 9300, 9301)), Layout.zigzag((0, 65536), 8, 3)):
        for call in plan(layout, CPU, budget).calls:
            rows = call.stop - call.start
            assert rows <= 64 or rows * call.segments.max_k <= 2**20 + rows * 8
            assert rows % 64 == 0 or call.stop in {s.row_stop for s in layout.segments}


def test_a_chunk_reads_only_the_keys_that_it_can_see() -> None:
    calls = plan(Layout.causal(1, 4096), CPU, 12 * 2**20).calls
    assert len(calls) > 4
    assert [call.keys for call in calls] == [(0, call.stop) for call in calls]


def test_many_short_documents_share_few_calls() -> None:
    lengths = [5 + 7 * (i % 9) for i in range(1000)]
    layout = Layout.packed(cases.offsets_of(tuple(lengths)))
    calls = plan(layout, CPU, BYTES).calls
    assert len(calls) == 1 and calls[0].segments.max_k == 64


def test_one_long_document_does_not_inflate_the_short_ones() -> None:
    layout = Layout.packed(cases.offsets_of((32,) * 500 + (16000,) + (32,) * 500))
    calls = plan(layout, CPU, BYTES).calls
    cells = sum((call.stop - call.start) * call.segments.max_k for call in calls)
    work = sum(s.num_rows * (s.key_stop - s.key_start) for s in layout.segments)
    assert len(calls) <= 4 and cells <= 2.1 * work


def test_segments_beyond_the_grid_are_split() -> None:
    layout = Layout.packed(tuple(range(70001)))
    calls = plan(layout, CPU, BYTES).calls
    assert all(call.segments.causal_offsets.numel() <= 65535 for call in calls) and len(calls) == 3


def test_padding_alone_is_no_call() -> None:
    assert plan(Layout.packed((0, 0), (0, 40)), CPU, BYTES).calls == ()
    tail = plan(Layout.packed((0, 8, 8), (0, 8, 4096)), CPU, BYTES).calls
    assert [(call.start, call.stop) for call in tail] == [(0, 8)]


def test_a_plan_is_made_once_for_equal_layouts() -> None:
    assert plan(Layout.causal(2, 64), CPU, BYTES) is plan(Layout.causal(2, 64), CPU, BYTES)


def test_plans_made_in_inference_mode_serve_training(stage: Stage) -> None:
    case = Case("zigzag2", "dense", 16, 32, 32, torch.bfloat16)
    layout = cases.zigzag((68, 52), 2)[1]
    backend, inputs = cudnn_backend.CudnnBackend(case.config()), cases.make_inputs(layout, case, stage.device)
    with torch.inference_mode():
        backend.attend(inputs.attention, backend.select(inputs.indexer, layout, 32), layout)
        calls = [*plan(layout, stage.device, BYTE_BUDGET).calls, *segment_calls(layout, stage.device)]
    held = [x for call in calls for x in (call.keys, *call.segments) if isinstance(x, torch.Tensor)]
    assert len(held) > 6 and not any(x.is_inference() for x in held)
    run(backend, inputs, backend.select(inputs.indexer, layout, 32), layout, "dense")


@pytest.mark.parametrize(("offset", "row_share", "keys"), [(0, 0, 0), (1, 1 / 32, 2), (2, 1 / 64, 1), (3, 0, 0)])
def test_the_leak_is_as_measured(offset: int, row_share: float, keys: int, stage: Stage) -> None:
    """32 heads, offset 1 mod 4: one row in 32 shows 1 or 2 future keys; 2 mod 4: one in 64 shows one; else none."""
    rows = 512
    layout = Layout(rows, rows + offset, (Segment(0, rows, 0, offset),))
    shown = torch.isfinite(score(operands(layout, 32, stage.device), segment_calls(layout, stage.device)[0]))
    visible = (
        torch.arange(rows + offset, device=stage.device) < torch.arange(rows, device=stage.device)[:, None] + offset + 1
    )
    leaked = (shown & ~visible).sum(1)
    assert bool((shown | ~visible).all()), "no visible key is missing"
    assert float((leaked > 0).float().mean()) == pytest.approx(row_share, abs=1 / rows)
    assert int(leaked.max()) == keys
    if stage.emulator is None:
        assert torch.equal(shown.cpu(), shown_keys(rows, rows + offset, offset, 32))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("loss", ["sparse", "dense"])
def test_a_leak_reaches_no_selection_and_no_loss(offset: int, loss: str, stage: Stage) -> None:
    rows = 140
    layout = Layout(rows, rows + offset, (Segment(0, rows, 0, offset),))
    case = Case("packed", loss, 16, 32, 64, torch.bfloat16)
    check_case(cudnn_backend.CudnnBackend(case.config()), case, layout, stage)


@pytest.mark.parametrize("heads", [1, 8, 24, 48])
def test_zero_heads_do_not_change_the_selection(heads: int, stage: Stage) -> None:
    layout = Layout.packed((0, 50, 90))
    case = Case("packed", "sparse", 16, heads, 32, torch.float32)
    check_case(cudnn_backend.CudnnBackend(case.config()), case, layout, stage)


@pytest.mark.parametrize("budget", [1, 12 * 3000])
def test_small_budgets_select_the_same(budget: int, stage: Stage) -> None:
    for layout in (Layout.causal(2, 150), cases.zigzag((70, 200), 2)[1]):
        case = Case("packed", "sparse", 16, 32, 64, torch.bfloat16)
        inputs = cases.make_inputs(layout, case, stage.device)
        whole = select_and_check(cudnn_backend.CudnnBackend(case.config()), inputs, layout, 64)
        cut = cudnn_backend.CudnnBackend(case.config(), budget).select(inputs.indexer, layout, 64)
        assert torch.equal(whole.indices_TK, cut.indices_TK) and torch.equal(whole.length_T, cut.length_T)
