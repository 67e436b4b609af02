"""``DSAttention``: the whole layer against NumPy, its loss, and what it must not do.

Faults of others, by kind: a teacher that runs although the loss is off, gradients of q, k and w that are allocated and
saved for nothing, an indexer that claims to train and gets no gradient, gradients that grow with the number of
microbatches, gradients of the loss that leak into the backbone, reads of projection weights past the module call, rows
with nothing to see. The layer's edge to Megatron has a file of its own, ``test_attention_edge``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    Layout,
    LossTracker,
    reference,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import AttentionInputs
from megatron.core.transformer.experimental_attention_variant.dsa.layout import valid_rows

from . import oracle
from .helpers import (
    LATENT,
    PADDED,
    Inputs,
    build_attention,
    context_for,
    draw,
    indexer_gradients,
    layer_inputs,
    model_config,
    run,
)

LOSSES = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


def expected_pass(attention: DSAttention, config: Any, inputs: Inputs, dense: bool) -> tuple[Any, ...]:
    """Output, selected keys, KL sum and the gradient of the KL sum in the indexer's q, k, w, by NumPy."""
    assert attention.indexer is not None
    weights = {name: p.detach().numpy() for name, p in attention.indexer.named_parameters()}
    at = np.concatenate([np.arange(end) for end in (9, 2, 1, 3, 11, 3)])  # documents, and padding (anything) after them
    q, k, w = oracle.indexer(weights, config, inputs.x.detach().numpy(), inputs.qr.detach().numpy(), at)
    query, kv, scale = inputs.query.detach().numpy(), inputs.key.detach().numpy(), attention.softmax_scale
    outputs, chosen, keys, targets = [], [], [], []
    for t, visible in enumerate(oracle.visible_keys_of(PADDED)):
        ids = oracle.best(oracle.index_scores(q[t], k, w[t]), visible, 5)
        outputs.append(oracle.attend(query[t], kv, ids, scale, LATENT)[0])
        chosen.append(ids)
        keys.append(list(visible) if dense else ids)
        targets.append(oracle.probabilities(query[t], kv, keys[t], scale).sum(0) if ids else np.zeros(0))
    return np.stack(outputs), chosen, *oracle.kl_and_gradients(q, k, w, keys, targets)


@LOSSES
def test_the_layer_equals_numpy(sparse: bool) -> None:
    config = model_config(use_sparse_loss=sparse)
    attention, inputs, losses = build_attention(config), layer_inputs(29).leaves(), LossTracker()
    made: dict[str, Any] = {}
    assert attention.indexer is not None
    attention.indexer.register_forward_hook(lambda _, __, operands: made.update(vars_of(operands)))
    output = run(attention, inputs, losses=losses)
    expected, _, kl_sum, dq, dk, dw = expected_pass(attention, config, inputs, not sparse)
    np.testing.assert_allclose(output.detach().numpy(), expected.reshape(29, -1), rtol=0, atol=1e-9)
    np.testing.assert_allclose(losses.kl_sums[1].numpy(), kl_sum, rtol=1e-6)
    assert losses.rows == {1: 21} and kl_sum > 1
    output.square().sum().backward()
    for name, wanted in (("q_TID", dq), ("k_SD", dk), ("w_TI", dw)):  # coefficient 0.7 over 21 valid rows
        np.testing.assert_allclose(made[name].grad.numpy(), wanted * 0.7 / 21, rtol=0, atol=1e-7)


def vars_of(operands: Any) -> dict[str, Tensor]:
    found = {name: getattr(operands, name) for name in ("q_TID", "k_SD", "w_TI")}
    for tensor in found.values():
        if tensor.requires_grad:
            tensor.retain_grad()
    return found


@LOSSES
def test_the_loss_trains_the_indexer_and_nothing_else(sparse: bool) -> None:
    """Inputs get the gradients that they get without the loss, bit for bit; x and qr get none at all."""
    config = model_config(use_sparse_loss=sparse)
    results = []
    for coefficient in (0.7, None):
        attention = build_attention(model_config(use_sparse_loss=sparse and bool(coefficient), loss_coeff=coefficient))
        inputs = layer_inputs(29).leaves()
        output = run(attention, inputs)
        output.square().sum().backward()
        assert inputs.x.grad is None and inputs.qr.grad is None
        results.append((output.detach(), inputs.query.grad, inputs.key.grad))
        gradients = indexer_gradients(attention)
        assert len(gradients) == (5 if coefficient else 0)
        assert all(gradient.abs().sum() > 0 for gradient in gradients.values())
    assert config.dsa_indexer_loss_coeff == 0.7
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@LOSSES
def test_a_frozen_backbone_still_trains_the_indexer(sparse: bool) -> None:
    """The dense warm-up's usual set-up: nothing but the indexer requires gradients."""
    config = model_config(use_sparse_loss=sparse)
    results = []
    for inputs in (layer_inputs(29), layer_inputs(29).leaves()):
        attention = build_attention(config)
        run(attention, inputs).square().sum().backward()
        results.append(indexer_gradients(attention))
    assert results[0].keys() == results[1].keys() and len(results[0]) == 5
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@LOSSES
def test_the_main_loss_does_not_scale_the_indexers(sparse: bool) -> None:
    """Whatever gradient reaches the output, zero included, the KL loss keeps its own scale."""
    config = model_config(use_sparse_loss=sparse)
    results = []
    for factor in (1.0, 0.0, 1024.0):
        attention = build_attention(config)
        (run(attention, layer_inputs(29).leaves()).sum() * factor).backward()
        results.append(indexer_gradients(attention))
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0])


def test_the_loss_follows_coefficient_normalizer_and_scale() -> None:
    def gradients(losses: LossTracker | None = None, coefficient: float = 0.7) -> dict[str, Tensor]:
        attention = build_attention(model_config(loss_coeff=coefficient))
        run(attention, layer_inputs(29).leaves(), losses=losses).sum().backward()
        return indexer_gradients(attention)

    plain = gradients()
    scaled = {
        "normalizer": (gradients(LossTracker(normalizer=84.0)), 21 / 84),
        "number": (gradients(LossTracker(grad_scale=8.0)), 8.0),
        "tensor": (gradients(LossTracker(normalizer=42.0, grad_scale=torch.tensor(1024.0))), 1024 * 21 / 42),
        "coefficient": (gradients(coefficient=1.4), 2.0),
    }
    for name, (result, factor) in scaled.items():
        for parameter, gradient in plain.items():
            torch.testing.assert_close(result[parameter], gradient * factor, rtol=1e-6, atol=1e-14, msg=name)


@pytest.mark.parametrize("per_token", [True, False], ids=["per-token", "per-microbatch"])
@LOSSES
def test_the_split_into_microbatches_changes_no_gradient(sparse: bool, per_token: bool) -> None:
    """Eight samples as 1 x 8, 2 x 4 and 8 x 1; the normalizer is what a trainer computes in each mode."""
    length, samples = 7, 8
    inputs, results = layer_inputs(samples * length), []
    for microbatches in (1, 2, 8):
        attention, batch = build_attention(model_config(use_sparse_loss=sparse)), samples // microbatches
        logged = 0.0
        for number in range(microbatches):
            rows = slice(number * batch * length, (number + 1) * batch * length)
            normalizer = samples * length if per_token else batch * length * microbatches
            losses = LossTracker(normalizer=float(normalizer))
            part = Inputs(*(t[rows] for t in inputs)).leaves()
            run(attention, part, Layout.causal(batch, length), losses=losses).sum().backward()
            logged += float(losses.kl_sums[1]) / normalizer
        results.append((torch.tensor(logged), *indexer_gradients(attention).values()))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-12)


# ---- loss off ----


class Spy(reference.ReferenceBackend):
    """Counts the verbs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls: list[str] = []

    def select(self, *args: Any) -> Any:
        self.calls.append("select")
        return super().select(*args)

    def attend(self, attention: Any, topk: Any, layout: Any) -> Any:
        self.calls.append("attend")
        self.attended_with_scores = topk.scores_TK is not None
        return super().attend(attention, topk, layout)

    def teacher(self, attention: Any, attended: Any, *args: Any) -> Iterator[Any]:
        self.calls.append("teacher")
        # Constants for any backend, also for one whose teacher would not stop gradients itself.
        assert not any(t.requires_grad for t in (attention.q_THD, attention.kv_SD, *attended))
        return super().teacher(attention, attended, *args)

    def indexer_loss(self, indexer: Any, targets: Any, topk: Any, layout: Any, dense: bool) -> Any:
        self.calls.append("indexer_loss")
        self.taught_with_scores = topk.scores_TK is not None
        return super().indexer_loss(indexer, targets, topk, layout, dense)


def spied(**options: Any) -> tuple[DSAttention, Spy]:
    attention = build_attention(model_config(**options))
    attention.backend = spy = Spy(attention.dsa)
    return attention, spy


OFF: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "no coefficient": ({"loss_coeff": None, "use_sparse_loss": False}, True, True),
    "coefficient of 0, sparse": ({"loss_coeff": 0.0}, True, True),
    "coefficient of 0, dense": ({"loss_coeff": 0.0, "use_sparse_loss": False}, True, True),
    "eval, sparse": ({}, False, True),
    "eval, dense": ({"use_sparse_loss": False}, False, True),
    "no_grad": ({}, True, False),
}


@pytest.mark.parametrize("name", OFF)
def test_without_a_loss_there_is_no_teacher(name: str) -> None:
    options, training, grad = OFF[name]
    attention, spy = spied(**options)
    attention.train(training)
    inputs, losses, saved = layer_inputs(29).leaves(), LossTracker(), []
    with (
        torch.set_grad_enabled(grad),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        output = run(attention, inputs, losses=losses)
    assert spy.calls == ["select", "attend"] and not spy.attended_with_scores and not losses.kl_sums and not losses.rows
    assert attention.indexer is not None
    frozen = not options.get("loss_coeff", 0.7)
    assert all(p.requires_grad != frozen for p in attention.indexer.parameters())
    if grad:
        output.sum().backward()
        assert inputs.query.grad.abs().sum() > 0
    assert not indexer_gradients(attention)
    # Nothing of the indexer was saved for backward: what attention alone saves, and no more.
    alone = []
    topk = attention.backend.select(*operands_of(attention, inputs))
    with (
        torch.set_grad_enabled(grad),
        torch.autograd.graph.saved_tensors_hooks(lambda t: alone.append(t) or t, lambda t: t),
    ):
        attended = reference.ReferenceBackend(attention.dsa).attend(
            AttentionInputs(inputs.query, inputs.key, attention.softmax_scale), topk, PADDED
        )
    assert sorted(map(tuple_of, saved)) == sorted(map(tuple_of, alone)) and (len(saved) > 0) == grad
    assert torch.equal(attended.out_THV.flatten(1), output)


def operands_of(attention: DSAttention, inputs: Inputs) -> tuple[Any, Layout, int]:
    assert attention.indexer is not None
    with torch.no_grad():
        return attention.indexer(inputs.x, inputs.qr, context_for(PADDED).positions_T), PADDED, attention.dsa.topk


def tuple_of(t: Tensor) -> tuple[Any, ...]:
    return str(t.dtype), *t.shape


@LOSSES
def test_with_a_loss_the_verbs_run_once_in_order(sparse: bool) -> None:
    attention, spy = spied(use_sparse_loss=sparse)
    run(attention, layer_inputs(29).leaves()).sum().backward()
    assert spy.calls == ["select", "attend", "teacher", "indexer_loss"] and spy.taught_with_scores


def test_evaluation_and_training_select_alike() -> None:
    attention = build_attention(model_config())
    trained = run(attention, layer_inputs(29))
    assert torch.equal(run(attention.eval(), layer_inputs(29)), trained)


def test_every_projection_is_called_and_called_once() -> None:
    """Hooks, sharded storage and adapters hang on the call; reading a weight would pass them by."""
    attention = build_attention(model_config())
    assert attention.indexer is not None
    calls: list[str] = []
    for name, module in attention.indexer.named_children():
        if list(module.parameters()):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    run(attention, layer_inputs(29).leaves()).sum().backward()
    assert sorted(calls) == ["k_norm", "linear_weights_proj", "linear_wk", "linear_wq_b"]


def test_an_evaluation_in_inference_mode_may_come_first() -> None:
    attention, layout = build_attention(model_config()), Layout.packed((0, 6, 29))
    with torch.inference_mode():
        evaluated = run(attention.eval(), layer_inputs(29), layout)
    trained = run(attention.train(), layer_inputs(29).leaves(), layout)
    trained.sum().backward()
    assert torch.equal(trained, evaluated) and len(indexer_gradients(attention)) == 5


@LOSSES
def test_a_bf16_layer_stays_near_the_fp64_one(sparse: bool) -> None:
    options = {"use_sparse_loss": sparse, "scoring_precision": "bf16", "topk": 40}  # all keys: no set can differ
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        attention = build_attention(model_config(params_dtype=dtype, **options))
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.copy_(parameter.bfloat16())
        inputs = Inputs(*(t.bfloat16().to(dtype) for t in layer_inputs(29))).leaves()
        losses = LossTracker()
        output = run(attention, inputs, losses=losses)
        output.sum().backward()
        assert output.dtype == inputs.query.grad.dtype == inputs.key.grad.dtype == dtype
        assert losses.kl_sums[1].dtype == torch.promote_types(dtype, torch.float32)
        gradients = indexer_gradients(attention)
        assert {gradient.dtype for gradient in gradients.values()} == {dtype}
        results.append([output, losses.kl_sums[1], inputs.query.grad, inputs.key.grad, *gradients.values()])
    for rough, exact in zip(*results, strict=True):
        assert (rough.double() - exact).norm() < 0.03 * exact.norm()


# ---- rows with nothing to see ----


@LOSSES
def test_padding_rows_output_zero_and_add_nothing(sparse: bool) -> None:
    """Whatever finite values padding holds, outputs, loss and every gradient are the same, and 0 on padding."""
    padding_T = ~valid_rows(PADDED, "cpu")
    results = []
    for filler in (0.0, 1e4):
        attention, inputs, losses = (
            build_attention(model_config(use_sparse_loss=sparse)),
            layer_inputs(29),
            LossTracker(),
        )
        for tensor in inputs:
            tensor[padding_T] = filler
        up_v = draw(2, 3, LATENT, seed=9).requires_grad_()
        inputs = inputs.leaves()
        output = run(attention, inputs, losses=losses, up_v_weight=up_v)
        output.sin().sum().backward()
        assert output[padding_T].eq(0).all() and inputs.query.grad[padding_T].eq(0).all()
        assert inputs.key.grad[padding_T].eq(0).all()
        results.append([output, losses.kl_sums[1], inputs.query.grad, inputs.key.grad, up_v.grad])
        results[-1] += list(indexer_gradients(attention).values())
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@LOSSES
@pytest.mark.parametrize("layout", [Layout.packed((0, 0), (0, 6)), Layout.packed((0,))], ids=["padding", "no rows"])
def test_nothing_but_padding_is_a_step_without_gradients(layout: Layout, sparse: bool) -> None:
    attention, losses = build_attention(model_config(use_sparse_loss=sparse)), LossTracker()
    inputs = layer_inputs(layout.num_rows).leaves()
    output = run(attention, inputs, layout, losses=losses)
    output.sum().backward()
    assert output.shape == (layout.num_rows, 2 * LATENT) and output.eq(0).all() and losses.kl_sums[1] == 0
    assert all(gradient.eq(0).all() for gradient in indexer_gradients(attention).values())
    assert inputs.query.grad.eq(0).all() and inputs.key.grad.eq(0).all()
