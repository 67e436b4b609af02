"""Layers add to the residual stream; full recompute changes nothing, with IndexShare and microbatches in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt import GPTModel, build_gpt_model
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker
from megatron.core.transformer.experimental_attention_variant.dsa.loss import recomputed_later
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.tiny_model import assert_same_gradients, context_of, gradients, tiny_config

BATCHES = torch.randint(0, 61, (2, 2, 9), generator=torch.Generator().manual_seed(3))
PACKED = PackedSeqParams.from_offsets((0, 7, 13), padded_offsets=(0, 8, 18))
AUXILIARY: dict[str, Any] = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1)


def make_model(**overrides: Any) -> GPTModel:
    torch.manual_seed(0)
    return build_gpt_model(tiny_config(**(AUXILIARY | overrides))).train()


def run(model: GPTModel, tokens: Tensor, packed: bool, losses: LossTracker | None = None) -> Tensor:
    if packed:
        return model(tokens.view(1, -1), labels=tokens.view(1, -1), packed_seq_params=PACKED, losses=losses).mean()
    return model(tokens, labels=tokens, losses=losses).mean()


def test_a_layer_adds_attention_then_mlp() -> None:
    config = tiny_config(params_dtype=torch.float64, experimental_attention_variant=None)
    layer = build_module(get_gpt_decoder_block_spec(config).layer_specs[1], config=config, layer_number=2)
    with torch.no_grad():
        for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
            norm.weight.uniform_(0.2, 5.0)
    x, context = torch.randn(6, 32, dtype=torch.float64), context_of(1, 6)
    middle = x + layer.self_attention(layer.input_layernorm(x), context)
    expected = middle + layer.mlp(layer.pre_mlp_layernorm(middle), context)
    torch.testing.assert_close(layer(x, context), expected, atol=0, rtol=0)


def test_the_block_ends_with_its_norm() -> None:
    model = make_model().eval()
    block, x = model.decoder, torch.randn(6, 32)
    with torch.no_grad():
        block.final_layernorm.weight.uniform_(0.2, 5.0)
        hidden, context = x, context_of(1, 6)
        for layer in block.layers:
            hidden = layer(hidden, context)
        assert torch.equal(block(x, context_of(1, 6)), block.final_layernorm(hidden))


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_recompute_changes_no_bit(packed: bool) -> None:
    """Two microbatches in flight (F1 F2 B1 B2): a recomputed layer must find its own microbatch's keys."""
    found = []
    for granularity in (None, "full"):
        model = make_model(recompute_granularity=granularity)
        trackers = [LossTracker(), LossTracker()]
        losses = [run(model, tokens, packed, tracker) for tokens, tracker in zip(BATCHES, trackers, strict=True)]
        for loss in losses:
            loss.backward()
        loads = [layer.mlp.router.local_tokens_per_expert for layer in model.decoder.layers[1:]]
        sums = [s for t in trackers for s in (*t.kl_sums.values(), *t.balance_sums.values())]
        found.append((torch.stack([*losses, *sums]), torch.stack(loads), gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1].sum() == 2 * 2 * 2 * (13 if packed else 18), "layers x microbatches x experts x rows"
    assert_same_gradients(found[1][2], found[0][2])


def test_order_of_backward_passes_does_not_matter() -> None:
    found = []
    for order in ((0, 1), (1, 0)):
        model = make_model(recompute_granularity="full")
        losses = [run(model, tokens, packed=False) for tokens in BATCHES]
        for index in order:
            losses[index].backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0], atol=1e-8, rtol=1e-5)


def test_an_evaluation_between_forward_and_backward_leaves_no_trace() -> None:
    found = []
    for evaluates in (False, True):
        model = make_model(recompute_granularity="full")
        loss = run(model, BATCHES[0], packed=False)
        if evaluates:
            with torch.no_grad():
                run(model.eval(), BATCHES[1], packed=False)
            model.train()
        loss.backward()
        found.append((gradients(model), model.decoder.layers[1].mlp.router.local_tokens_per_expert))
    assert_same_gradients(found[1][0], found[0][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("granularity", "again"), [(None, [False]), ("full", [True, False])], ids=["kept", "full"])
def test_the_first_pass_knows_that_nobody_reads_what_it_saves(granularity: str | None, again: list[bool]) -> None:
    """In every layer; outside, and in evaluation, nothing is different afterwards."""
    model = make_model(recompute_granularity=granularity)
    seen: list[list[bool]] = [[] for _ in model.decoder.layers]
    for layer, passes in zip(model.decoder.layers, seen, strict=True):
        layer.register_forward_pre_hook(lambda module, args, passes=passes: passes.append(recomputed_later()))
    run(model, BATCHES[0], packed=False).backward()
    assert seen == [again] * len(seen) and not recomputed_later()


@pytest.mark.parametrize(("granularity", "calls"), [(None, 1), ("full", 2)])
def test_every_layer_runs_again_in_backward(granularity: str | None, calls: int) -> None:
    model = make_model(recompute_granularity=granularity)
    count = [0] * 3

    def counter(number: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            count[number] += 1

        return hook

    for number, layer in enumerate(model.decoder.layers):
        layer.self_attention.register_forward_pre_hook(counter(number))
    run(model, BATCHES[0], packed=False).backward()
    assert count == [calls] * 3


def test_recompute_keeps_the_layers_inputs_alone() -> None:
    saved = {}
    for granularity in (None, "full"):
        model, kept = make_model(recompute_granularity=granularity), [0]

        def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.decoder(torch.randn(18, 32, requires_grad=True), context_of(2, 9))
        saved[granularity] = kept[0]
    assert saved["full"] < 3 * 18 * 32 + 4 * 18 * 32 < saved[None]


@pytest.mark.parametrize("shared", [None, 8], ids=["routed", "shared"])
def test_recompute_begins_before_anything_else_of_a_layers_backward(shared: int | None) -> None:
    """Whether a rank's rows hold padding must not change what runs first: over ranks, both start collectives."""
    for packed in (False, True):
        model = make_model(recompute_granularity="full", moe_shared_expert_intermediate_size=shared)
        events: list[str] = []
        moe = next(layer for layer in model.decoder.layers if isinstance(layer.mlp, MoELayer))
        moe.self_attention.register_forward_pre_hook(lambda *_, e=events: e.append("layer"))
        for part in (moe.mlp.experts, moe.mlp.router):
            output = "experts" if part is moe.mlp.experts else "router"

            def watch(_: nn.Module, args: Any, out: Any, e: list[str] = events, name: str = output) -> None:
                gradient_of = out[0] if name == "experts" else out.scores_TE
                gradient_of.register_hook(lambda _: e.append(f"gradient of {name}"))

            part.register_forward_hook(watch)
        loss = run(model, BATCHES[0], packed)
        events.clear()
        loss.backward()
        assert events[0] == "layer" and "gradient of experts" in events and events.count("layer") == 1


def test_evaluation_does_not_recompute() -> None:
    model = make_model(recompute_granularity="full").eval()
    calls = []
    model.decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    run(model, BATCHES[0], packed=False).backward()
    assert len(calls) == 1
