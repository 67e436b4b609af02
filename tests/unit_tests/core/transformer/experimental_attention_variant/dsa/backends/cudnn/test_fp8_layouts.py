"""In FP8, equal (q, k, w) select equal sets: in every layout, and in whole layers that share, recompute or replay.

Layouts are compared with each other and not with the reference, so nothing is left to a tolerance: the kernels must
score a pair of a row and a key alike wherever the two lie in a call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    LossTracker,
    record_topk,
    replay_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, frontend, scoring
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext
from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout
from megatron.core.transformer.experimental_attention_variant.dsa.precision import quantize_operands
from megatron.core.transformer.experimental_attention_variant.dsa.quantization import Quantized
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend, score
from megatron.core.transformer.transformer_config import MLATransformerConfig

from ... import helpers
from ...sharing_model import other_keys
from .. import cases
from ..cases import LATENT, ROPE, WIDTH, Case
from ..conftest import Stage
from .test_fp8 import TENSOR_CORE_TOLERANCE, worst_gap

SMALL_BUDGET = 12 * 64 * 96
TOPK = 24


# ---- one document, alone and in company ----


def lengths_of(stage: Stage) -> tuple[int, ...]:
    """Documents; the one that is followed is the third. A quarter of it is 1 modulo 4, so CP 2 has every offset."""
    return (5, 70, 4 * 37, 33) if stage.emulator is not None else (5, 70, 4 * 1029, 333)


def offsets(lengths: tuple[int, ...], multiple: int = 1) -> tuple[int, ...]:
    return tuple(accumulate((-(-n // multiple) * multiple for n in lengths), initial=0))


def layouts_of(lengths: tuple[int, ...]) -> dict[str, tuple[list[Layout], tuple[int, ...]]]:
    """Layouts of all documents, and the offsets by which their keys are numbered."""
    real, by_four, by_sixteen = offsets(lengths), offsets(lengths, 4), offsets(lengths, 16)
    whole, cuts = Layout.packed(real), [0, 42, real[2] + 41, real[2] + 90, real[-1]]
    return {
        "packed": ([whole], real),
        "padded": ([Layout.packed(real, by_sixteen)], by_sixteen),
        "zigzag": ([Layout.zigzag(real, 2, rank, by_four) for rank in range(2)], by_four),
        "rows": ([whole.slice_rows(a, b) for a, b in zip(cuts, cuts[1:], strict=False)], real),
    }


def spread_out(indexer: IndexerInputs, real: tuple[int, ...], padded: tuple[int, ...]) -> IndexerInputs:
    """The documents' operands at their padded places."""
    places = torch.cat([torch.arange(b - a) + p for a, b, p in zip(real, real[1:], padded, strict=False)])
    places = places.to(indexer.k_SD.device)
    made = []
    for x in (indexer.q_TID, indexer.k_SD, indexer.w_TI):
        made.append(torch.full((padded[-1], *x.shape[1:]), 1e4, dtype=x.dtype, device=x.device))
        made[-1][places] = x.detach()
    return IndexerInputs(*made)


def rows_of(layout: Layout) -> Tensor:
    """Which global row each row is: keys are numbered as rows are."""
    rows = torch.zeros(layout.num_rows, dtype=torch.long)
    for s in layout.segments:
        rows[s.row_start : s.row_stop] = torch.arange(s.key_start + s.causal_offset, s.key_stop)
    return rows


def selected(backend: CudnnBackend, indexer: IndexerInputs, layouts: list[Layout], start: int, tokens: int) -> Tensor:
    """Positions that each token of the document at ``start`` selects, put together from all layouts."""
    found = torch.full((tokens, TOPK), -2, dtype=torch.int32)
    for layout in layouts:
        rows = rows_of(layout).to(indexer.w_TI.device)
        own = IndexerInputs(indexer.q_TID[rows], indexer.k_SD, indexer.w_TI[rows])
        ids = backend.select(own, layout, TOPK).indices_TK.cpu()
        for s in (s for s in layout.segments if s.key_start == start):
            part = ids[s.row_start : s.row_stop]
            found[s.causal_offset : s.causal_offset + s.num_rows] = torch.where(part < 0, -1, part - start)
    return found


@pytest.mark.parametrize("budget", [scoring.BYTE_BUDGET, SMALL_BUDGET], ids=["whole", "chunked"])
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("carrier", cases.CARRIERS, ids=["bf16", "fp32"])
def test_a_document_selects_the_same_alone_and_in_company(
    carrier: torch.dtype, heads: int, budget: int, stage: Stage
) -> None:
    lengths = lengths_of(stage)
    real = offsets(lengths)
    case = Case("packed", "off", 16, heads, TOPK, carrier, lengths)
    backend = CudnnBackend(case.config(scoring_precision="fp8"), budget)
    indexer = cases.make_inputs(Layout.packed(real), case, stage.device).indexer
    own = slice(real[2], real[3])
    alone = IndexerInputs(indexer.q_TID[own].detach(), indexer.k_SD[own].detach(), indexer.w_TI[own].detach())
    wanted = selected(CudnnBackend(backend.config), alone, [Layout.causal(1, lengths[2])], 0, lengths[2])
    assert (wanted[TOPK:] >= 0).all() and (wanted[-1] != torch.arange(lengths[2])[-TOPK:]).any()
    found_offsets = set()
    for name, (layouts, places) in layouts_of(lengths).items():
        joined = spread_out(indexer, real, places)
        assert torch.equal(selected(backend, joined, layouts, places[2], lengths[2]), wanted), name
        found_offsets |= {s.causal_offset % 4 for layout in layouts for s in layout.segments}
    assert found_offsets == {0, 1, 2, 3}


# ---- whole layers ----


HIDDEN, RANK, HEADS = 48, 32, 16
SOURCE = {1: 1, 2: 1, 3: 3}
# Real and padded offsets, and the keys that a row selects.
SMALL = (0, 7, 19, 19, 28), (0, 8, 20, 20, 32), 5
LARGE = (0, 133, 997, 997, 2060), (0, 136, 1000, 1000, 2064), 192


def size_of(stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return LARGE if stage.emulator is None else SMALL


class Layer(nn.Module):
    """Projections, DSA and an output projection, in BF16."""

    def __init__(self, config: MLATransformerConfig, number: int) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, HEADS * WIDTH + WIDTH + RANK, dtype=torch.bfloat16)
        self.attention = helpers.build_attention(config, number)
        self.output = nn.Linear(HEADS * LATENT, HIDDEN, dtype=torch.bfloat16)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        query, key, qr = self.project(x).split((HEADS * WIDTH, WIDTH, RANK), dim=-1)
        attended = self.attention(query.unflatten(-1, (HEADS, -1)), key, x=x, qr=qr, context=context)
        return x + self.output(attended).tanh()


class Model(nn.Module):
    """Layers 1 and 3 select; 2 reuses the keys of 1."""

    def __init__(self, stage: Stage, recompute: bool = False, **options: Any) -> None:
        super().__init__()
        values: dict[str, Any] = {
            "num_layers": 3, "topk_freq": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "q_lora_rank": RANK,
            "kv_lora_rank": LATENT, "qk_head_dim": 64, "qk_pos_emb_head_dim": ROPE, "v_head_dim": 64, "n_heads": 32,
            "head_dim": 128, "topk": size_of(stage)[2], "dsa_kernel_backend": "cudnn", "scoring_precision": "fp8",
            "loss_coeff": 0.0, "use_sparse_loss": False, "params_dtype": torch.bfloat16, "bf16": True,
        }  # fmt: skip
        config = helpers.model_config(**(values | options))
        self.recompute, self.device = recompute, stage.device
        self.layers = nn.ModuleList(Layer(config, n + 1) for n in range(3))
        helpers.randomize(self, seed=7)
        self.to(stage.device)
        self.attended: list[tuple[int, Tensor]] = []
        for layer in self.layers:
            self._watch(layer.attention)

    def _watch(self, attention: DSAttention) -> None:
        """Note the ids that each call of the backend attends to."""
        real = attention.backend.attend

        def attend(operands: Any, topk: TopK, layout: Layout) -> Any:
            self.attended.append((attention.layer_number, topk.indices_TK))
            return real(operands, topk, layout)

        attention.backend.attend = attend  # type: ignore[method-assign]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, context, use_reentrant=False) if self.recompute else layer(x, context)
        return x

    def ids_by_layer(self) -> dict[int, list[Tensor]]:
        return {n: [ids for number, ids in self.attended if number == n] for n in (1, 2, 3)}


def context_of(stage: Stage) -> ForwardContext:
    real, padded, _ = size_of(stage)
    packed = PackedSeqParams.from_offsets(real, padded, stage.device)
    return ForwardContext.build(1, padded[-1], packed, stage.device, LossTracker())


def microbatch(number: int, stage: Stage) -> Tensor:
    x = helpers.draw(size_of(stage)[1][-1], HIDDEN, seed=1000 + number, dtype=torch.bfloat16)
    return x.to(stage.device).requires_grad_()


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> list[Any]:
    """The query operands of every scoring call. On the emulator, layers may be built without a GPU."""
    seen: list[Any] = []
    real = frontend.score_segments

    def spy(q: Tensor | Quantized, k: Tensor | Quantized, w: Tensor, segments: Any) -> Tensor:
        assert type(q) is type(k) and w.dtype == torch.float32
        seen.append(q)
        return real(q, k, w, segments)

    monkeypatch.setattr(scoring, "score_segments", spy)
    if stage.emulator is not None:
        monkeypatch.setattr(CudnnBackend, "unsupported", staticmethod(lambda config, device: None))
    return seen


def recorded(model: Model, x: Tensor, stage: Stage) -> tuple[dict[int, TopK], Tensor]:
    with record_topk(model) as record:
        output = model(x, context_of(stage))
    return dict(record), output


def same(first: dict[int, TopK], second: dict[int, TopK]) -> bool:
    assert first.keys() == second.keys() == {1, 3}
    return all(torch.equal(first[n].indices_TK, second[n].indices_TK) for n in first)


def test_layers_record_what_their_indexers_select_in_fp8(stage: Stage, spied: list[Any]) -> None:
    model = Model(stage)
    operands: dict[int, IndexerInputs] = {}
    for number in (1, 3):
        layer = model.layers[number - 1].attention
        layer.indexer.register_forward_hook(lambda _, __, made, number=number: operands.update({number: made}))
    record, _ = recorded(model, microbatch(0, stage), stage)
    assert len(spied) == 2 and all(isinstance(q, Quantized) for q in spied)
    layout, config = context_of(stage).layout, model.layers[0].attention.dsa
    for number, topk in record.items():
        wanted = ReferenceBackend(config).select(operands[number], layout, config.topk)
        assert torch.equal(topk.length_T, wanted.length_T)
        if stage.emulator is not None:
            assert torch.equal(topk.indices_TK, wanted.indices_TK)
        exact = score(quantize_operands(operands[number]))
        assert worst_gap(exact, layout, topk.indices_TK, topk.length_T) < TENSOR_CORE_TOLERANCE
    plain, _ = recorded(Model(stage, scoring_precision="bf16"), microbatch(0, stage), stage)
    assert not same(record, plain)


def test_sharing_layers_attend_to_their_sources_keys(stage: Stage, spied: list[Any]) -> None:
    model = Model(stage)
    record, _ = recorded(model, microbatch(0, stage), stage)
    for number, (ids,) in model.ids_by_layer().items():
        assert torch.equal(ids, record[SOURCE[number]].indices_TK)


def test_recompute_attends_to_the_same_keys_and_scores_nothing_again(stage: Stage, spied: list[Any]) -> None:
    """Two microbatches in flight: the first is recomputed after the second one ran."""
    expected = [recorded(Model(stage), microbatch(n, stage), stage)[0] for n in range(2)]
    model = Model(stage, recompute=True)
    spied.clear()
    inputs = [microbatch(n, stage) for n in range(2)]
    runs = [recorded(model, x, stage) for x in inputs]
    assert all(same(record, wanted) for (record, _), wanted in zip(runs, expected, strict=True))
    forward = model.ids_by_layer()
    model.attended.clear()
    for n, (_, output) in enumerate(runs):
        output.sum().backward()
        for number, (ids,) in model.ids_by_layer().items():
            assert torch.equal(ids, forward[number][n])
        model.attended.clear()
    assert len(spied) == 4  # two selecting layers, two microbatches
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_replay_attends_to_the_recorded_keys_and_scores_nothing(stage: Stage, spied: list[Any]) -> None:
    """In forward and recompute. Its own record changes no bit of the output; another one is attended to as it is."""
    own, output = recorded(Model(stage), microbatch(0, stage), stage)
    others = other_keys(context_of(stage).layout, size_of(stage)[2])
    others = others._replace(indices_TK=others.indices_TK.to(stage.device), length_T=others.length_T.to(stage.device))
    model = Model(stage, recompute=True)
    spied.clear()
    for record in (own, {1: others, 3: others}):
        model.attended.clear()
        with replay_topk(model, record):
            replayed = model(microbatch(0, stage), context_of(stage))
        replayed.sum().backward()
        assert torch.equal(replayed, output) == (record is own)
        for number, seen in model.ids_by_layer().items():
            assert len(seen) == 2 and all(torch.equal(ids, record[SOURCE[number]].indices_TK) for ids in seen)
    assert spied == []


LOSS = {"loss_coeff": 0.5, "scoring_precision": "bf16"}


@pytest.mark.parametrize(
    ("sparse", "replayed"), [(True, True), (False, False)], ids=["sparse-replayed", "dense-selected"]
)
def test_losses_score_in_bf16_also_when_recomputed(
    sparse: bool, replayed: bool, stage: Stage, spied: list[Any]
) -> None:
    """What recompute scores again, for the loss, it scores in the configured precision; the set stays."""
    expected, _ = recorded(Model(stage, **LOSS, use_sparse_loss=sparse), microbatch(0, stage), stage)
    model = Model(stage, recompute=True, **LOSS, use_sparse_loss=sparse)
    spied.clear()
    run: Callable[[], Tensor] = lambda: model(microbatch(0, stage), context_of(stage))  # noqa: E731
    if replayed:
        with replay_topk(model, expected):
            output = run()
    else:
        with record_topk(model) as record:
            output = run()
        assert same(dict(record), expected)
    output.sum().backward()
    assert len(spied) >= 4 and all(isinstance(q, Tensor) and q.dtype == torch.bfloat16 for q in spied)
    for number, seen in model.ids_by_layer().items():
        assert len(seen) == 2 and all(torch.equal(ids, expected[SOURCE[number]].indices_TK) for ids in seen)
