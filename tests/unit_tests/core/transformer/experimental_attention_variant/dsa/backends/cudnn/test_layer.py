"""A whole layer on the cudnn backend: the objective, activation recompute, shared selections, FP32 key gradients.

The four verbs are compared elsewhere; here ``DSAttention`` calls them, in BF16, and is compared with itself on the
reference backend: same weights, same inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention, Layout, LossTracker, TopKCache
from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import CudnnBackend, scoring
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.layout import positions
from megatron.core.transformer.experimental_attention_variant.dsa.loss import recompute_contexts
from megatron.core.transformer.forward_context import ForwardContext

from ...helpers import build_attention, draw, model_config
from ..cases import LATENT, ROPE, WIDTH, relative_error
from ..conftest import Stage

LAYOUT = Layout.packed((0, 30, 70), (0, 32, 80))
HEADS = 16
# Two BF16 pipelines, each rounding on its own.
TOLERANCE = 1.5e-2


@pytest.fixture(autouse=True)
def built_anywhere(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    if stage.emulator is not None:
        monkeypatch.setattr(CudnnBackend, "unsupported", staticmethod(lambda config, device: None))


def build(stage: Stage, backend: str = "cudnn", number: int = 1, **options: Any) -> DSAttention:
    shapes = {"num_attention_heads": HEADS, "kv_lora_rank": LATENT, "qk_pos_emb_head_dim": ROPE, "qk_head_dim": 64}
    indexer = {"n_heads": 16, "head_dim": 128, "topk": 24, "scoring_precision": "bf16", "loss_coeff": 0.7}
    config = model_config(
        **(shapes | indexer | options), params_dtype=torch.bfloat16, dsa_kernel_backend=backend, num_layers=3
    )
    return build_attention(config, number).to(stage.device)


class Step(NamedTuple):
    out: Tensor
    kl_sum: Tensor
    grads: dict[str, Tensor]


def leaves(stage: Stage, rows: int = LAYOUT.num_rows) -> list[Tensor]:
    shapes = ((rows, HEADS, WIDTH), (rows, WIDTH), (rows, 24), (rows, 10))
    made = [draw(*shape, seed=50 + i, dtype=torch.bfloat16).to(stage.device) for i, shape in enumerate(shapes)]
    return [x.requires_grad_() for x in made]


def context_for(layout: Layout, stage: Stage, losses: LossTracker) -> ForwardContext:
    return ForwardContext(layout, positions(layout, stage.device), TopKCache(), losses)


def step(layers: list[DSAttention], stage: Stage, recompute: dict[str, Any] | None = None, **tracker: Any) -> Step:
    """Layers one after another on the same inputs; their outputs are summed up."""
    losses, given = LossTracker(**tracker), leaves(stage)
    context = context_for(LAYOUT, stage, losses)

    def run(layer: DSAttention) -> Tensor:
        def call(query: Tensor, key: Tensor, x: Tensor, qr: Tensor) -> Tensor:
            return layer(query, key, x=x, qr=qr, context=context)

        return call(*given) if recompute is None else checkpoint(call, *given, use_reentrant=False, **recompute)

    out = torch.stack([run(layer) for layer in layers]).sum(0)
    out.backward(draw(*out.shape, seed=60, dtype=torch.bfloat16).to(stage.device))
    named = [(f"{i}.{name}", p) for i, layer in enumerate(layers) for name, p in layer.named_parameters()]
    grads = {name: x.grad for name, x in [*zip(("query", "key"), given[:2], strict=True), *named]}
    return Step(out.detach(), torch.stack(list(losses.kl_sums.values())).sum(), grads)


def assert_close(got: Step, wanted: Step) -> None:
    assert relative_error(got.out, wanted.out) < TOLERANCE
    assert float(got.kl_sum) == pytest.approx(float(wanted.kl_sum), rel=TOLERANCE)
    assert got.grads.keys() == wanted.grads.keys() and len(got.grads) >= 7
    for name, grad in got.grads.items():
        assert relative_error(grad, wanted.grads[name]) < 2 * TOLERANCE, name


@pytest.mark.parametrize("per_token", [False, True], ids=["per row", "per token"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_a_layer_equals_the_reference(sparse: bool, per_token: bool, stage: Stage) -> None:
    tracker = {"normalizer": 37.0, "grad_scale": 8.0} if per_token else {}
    steps = [step([build(stage, name, use_sparse_loss=sparse)], stage, **tracker) for name in ("cudnn", "none")]
    assert_close(*steps)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_the_normalizer_scales_the_indexer_alone(sparse: bool, stage: Stage) -> None:
    layer = build(stage, use_sparse_loss=sparse)
    one = step([layer], stage, normalizer=64.0)
    layer.zero_grad()
    half = step([layer], stage, normalizer=128.0)
    assert torch.equal(one.kl_sum, half.kl_sum)
    for name, grad in one.grads.items():
        assert relative_error(half.grads[name] * (1 if name in ("query", "key") else 2), grad) < TOLERANCE, name


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_recompute_changes_nothing_and_selects_once(sparse: bool, told: bool, stage: Stage) -> None:
    """Where the first pass knows that it is the first, teacher and loss run in the second alone."""
    kept = step([build(stage, use_sparse_loss=sparse)], stage)
    if stage.emulator is not None:
        stage.emulator.calls.clear()
    contexts = {"context_fn": recompute_contexts} if told else {}
    again = step([build(stage, use_sparse_loss=sparse)], stage, recompute=contexts)
    assert_close(again, kept)
    if stage.emulator is not None:
        calls = stage.emulator.calls
        assert calls["indexer_top_k"] == 1 and calls["flash_mla"] == 2 and calls["sparse_backward"] == 1
        assert calls["indexer_backward"] == int(sparse)
        passes = 1 if told else 2
        assert calls["sparse_target"] == (passes if sparse else 0)
        for name in ("dense_target", "dense_indexer_backward"):
            assert calls[name] == (0 if sparse else len(LAYOUT.segments) * passes)
        # The dense loss scores its own chunks; the sparse one scores the selected keys again in the second pass.
        assert calls["indexer_forward"] == 1 + (1 if sparse else len(LAYOUT.segments) * passes)


def test_shared_layers_attend_to_the_same_keys(stage: Stage) -> None:
    """Layer 1 selects, layers 2 and 3 reuse its keys and have no indexer."""
    shared = {"topk_freq": 3, "skip_topk_offset": 1}
    steps = []
    for backend in ("cudnn", "none"):
        layers = [build(stage, backend, number, **shared) for number in (1, 2, 3)]
        assert [layer.indexer is not None for layer in layers] == [True, False, False]
        steps.append(step(layers, stage))
    assert_close(*steps)
    if stage.emulator is not None:
        calls = stage.emulator.calls
        assert calls["indexer_forward"] == calls["sparse_target"] == 1 and calls["flash_mla"] == 3


def test_key_gradients_of_many_chunks_add_up_in_fp32(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few rows each: summed up in BF16, the indexer's key gradients would lose what FP32 keeps."""
    monkeypatch.setattr(scoring, "_ROW_MULTIPLE", 4)
    layer, found = build(stage, use_sparse_loss=False), []
    for budget in (2**31, 24 * 100):
        assert isinstance(layer.backend, CudnnBackend)
        layer.backend.byte_budget = budget
        made: list[IndexerInputs] = []

        def keep(module: Any, args: Any, operands: IndexerInputs, made: list[IndexerInputs] = made) -> None:
            operands.k_SD.retain_grad()
            made.append(operands)

        assert layer.indexer is not None
        hook = layer.indexer.register_forward_hook(keep)
        layout, losses = Layout.causal(1, 192), LossTracker()
        query, key, x, qr = leaves(stage, 192)
        layer(query, key, x=x, qr=qr, context=context_for(layout, stage, losses)).sum().backward()
        hook.remove()
        found.append(made[0].k_SD.grad)
    whole, cut = found
    assert whole is not None and cut is not None and whole.dtype == torch.bfloat16
    assert relative_error(cut, whole) < 2.5e-3, "two roundings to BF16"
