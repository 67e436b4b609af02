"""FP8 scoring of the cudnn backend, in every layout, against the reference on the same codes and scales.

The emulator sums in FP32, so its sets equal the reference's exactly. Hopper's tensor cores keep fewer bits of a sum,
so on
the kernels a selected key may score lower than the best unselected one by ``TENSOR_CORE_TOLERANCE`` of the row's
largest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, frontend, scoring
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.capability import unsupported
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import (
    IndexerInputs,
    QuantizedInputs,
)
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.precision import quantize_operands
from megatron.core.transformer.experimental_attention_variant.dsa.quantization import Quantized
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend, score

from .. import cases
from ..cases import Case
from ..conftest import Stage

TENSOR_CORE_TOLERANCE = 1e-3
SMALL_BUDGET = 12 * 64 * 96


def config_of(case: Case, **changes: Any):
    return case.config(scoring_precision="fp8", **changes)


def worst_gap(scores_TS: Tensor, layout: Layout, ids_TK: Tensor, length_T: Tensor) -> float:
    """By how much an unselected visible key outscores a selected one, relative to the row's largest score."""
    starts, ends = row_bounds(layout, scores_TS.device)
    columns = torch.arange(scores_TS.shape[1], device=scores_TS.device)
    visible = (columns >= starts[:, None]) & (columns < ends[:, None])
    chosen = torch.zeros_like(visible)
    chosen.scatter_(1, ids_TK.clamp(min=0).long(), ids_TK >= 0)
    chosen[:, 0] = (ids_TK == 0).any(1)
    best_out = scores_TS.masked_fill(~visible | chosen, -torch.inf).amax(1)
    worst_in = scores_TS.masked_fill(~chosen, torch.inf).amin(1)
    largest = scores_TS.masked_fill(~visible, 0.0).abs().amax(1).clamp(min=1e-6)
    gap = ((best_out - worst_in) / largest)[(length_T > 0) & (ends - starts > length_T)]
    return float(gap.max()) if gap.numel() else 0.0


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32", "fp32_k"])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("carrier", cases.CARRIERS, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(cases.LAYOUTS))
def test_selection_equals_the_reference(
    name: str, carrier: torch.dtype, heads: int, scale_format: str, stage: Stage
) -> None:
    if (scale_format != "ue8m0") and (heads == 64 or carrier is torch.float32):
        heads, carrier = 32, torch.bfloat16  # one cell a format is enough: formats differ in quantization alone
    case = Case(name, "off", 16, heads, 64, carrier)
    config = config_of(case, fp8_scale_format=scale_format)
    for layout in case.layouts():
        indexer = cases.make_inputs(layout, case, stage.device).indexer
        got = CudnnBackend(config).select(indexer, layout, case.k)
        wanted = ReferenceBackend(config).select(indexer, layout, case.k)
        assert torch.equal(got.length_T, wanted.length_T)
        if stage.emulator is not None:
            assert torch.equal(got.indices_TK, wanted.indices_TK)
            continue
        exact = score(quantize_operands(indexer, scale_format))
        assert worst_gap(exact, layout, got.indices_TK, got.length_T) < TENSOR_CORE_TOLERANCE


@pytest.mark.parametrize("heads", [32, 64])
def test_scores_equal_the_dequantized_reference(heads: int, stage: Stage) -> None:
    """Tight against the dequantized operands, loose against what was quantized; the mask by lengths is exact."""
    case = Case("batch1", "off", 16, heads, 64, torch.bfloat16)
    layout = case.layouts()[0]
    indexer = cases.make_inputs(layout, case, stage.device).indexer
    operands = scoring.scoring_operands(indexer, config_of(case))
    assert isinstance(operands, QuantizedInputs)
    (call,) = scoring.plan(layout, stage.device, scoring.BYTE_BUDGET).calls
    got = scoring.score(operands, call)[:, : layout.num_keys]
    visible = torch.ones_like(got, dtype=torch.bool).tril()
    tight, loose = score(quantize_operands(indexer)), score(indexer)
    assert cases.relative_error(got[visible], tight[visible]) < 5e-4
    assert 5e-3 < cases.relative_error(got[visible], loose[visible]) < 5e-2


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", list(cases.LAYOUTS))
def test_every_call_sees_the_configured_precision(
    name: str, budget: int, precision: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spy on the one scoring call: operand types in every layout, FP32 carriers, FP32 head weights."""
    seen = []
    real = frontend.score_segments

    def spy(q: Tensor | Quantized, k: Tensor | Quantized, w: Tensor, segments: Any) -> Tensor:
        seen.append((q, k, w))
        return real(q, k, w, segments)

    monkeypatch.setattr(scoring, "score_segments", spy)
    case = Case(name, "off", 16, 32, 64, torch.float32)
    config = case.config(scoring_precision=precision)
    for layout in case.layouts():
        before = len(seen)
        CudnnBackend(config, budget).select(cases.make_inputs(layout, case, stage.device).indexer, layout, case.k)
        assert (len(seen) > before) == bool(layout.segments)
    for q, k, w in seen:
        assert w.dtype == torch.float32
        if precision == "fp8":
            assert isinstance(q, Quantized) and isinstance(k, Quantized)
            assert q.values.dtype == k.values.dtype == torch.float8_e4m3fn
        else:
            assert isinstance(q, Tensor) and isinstance(k, Tensor) and q.dtype == k.dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "wanted"), [("bf16", 1.0), ("fp8", 1.0)])
@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
def test_operands_just_above_one(precision: str, wanted: float, budget: int, stage: Stage) -> None:
    """q = k = 1.001 in one channel and one head, weight 1: rounded at the boundary, the score is 1.0 exactly."""
    case = Case("batch1", "off", 16, 32, 64, torch.float32)
    layout = case.layouts()[0]
    q = torch.zeros(layout.num_rows, 32, 128, device=stage.device)
    k = torch.zeros(layout.num_keys, 128, device=stage.device)
    w = torch.zeros(layout.num_rows, 32, device=stage.device)
    q[:, 0, 0], k[:, 0], w[:, 0] = 1.001, 1.001, 1.0
    operands = scoring.scoring_operands(IndexerInputs(q, k, w), case.config(scoring_precision=precision))
    for call in scoring.plan(layout, stage.device, budget).calls:
        scores = scoring.score(operands, call)
        for row in range(0, call.stop - call.start, 7):
            assert torch.equal(scores[row, : call.start + row + 1].unique(), torch.tensor([wanted], device=q.device))


@pytest.mark.parametrize("heads", [8, 16, 48])
def test_other_head_counts_are_refused(heads: int) -> None:
    config = config_of(Case("batch1", "off", 16, 32, 64, torch.bfloat16))
    reason = unsupported(type(config)(**{**vars(config), "n_heads": heads}), torch.device("cpu"))
    assert reason is not None and f"dsa_indexer_n_heads={heads}" in reason and "32 or 64" in reason
