"""Routing against plain Python over every row, and the bias update against its rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import distributed, nn

from megatron.core.models.gpt import build_gpt_model
from megatron.core.transformer.moe import TopKRouter, update_expert_bias
from megatron.core.transformer.moe.router import count_experts
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.unit_tests.core.tiny_model import tiny_config

Chosen = dict[int, float]


def make_router(**overrides: Any) -> TopKRouter:
    router = TopKRouter(tiny_config(**({"num_moe_experts": 8, "moe_router_topk": 3} | overrides)))
    with torch.no_grad():
        router.weight.normal_()
        if router.expert_bias is not None:
            router.expert_bias.normal_(std=0.3)
    return router


def route_one_row(logits: list[float], bias: list[float], config: MLATransformerConfig) -> Chosen:
    """Expert -> weight, in scalar arithmetic."""
    if config.moe_router_score_function == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    groups = config.moe_router_num_groups or 1
    size = len(choice) // groups
    group_scores = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -group_scores[g])[: config.moe_router_group_topk or 1]
    allowed = [e for e in range(len(choice)) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config.moe_router_topk]
    total = sum(scores[e] for e in chosen) + 1e-20 if config.norm_topk_prob else 1.0
    factor = config.moe_router_topk_scaling_factor or 1.0
    return {e: scores[e] / total * factor for e in chosen}


CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "no-bias": dict(moe_router_enable_expert_bias=False),
    "no-renormalization": dict(norm_topk_prob=False),
    "no-scaling": dict(moe_router_topk_scaling_factor=None),
    "softmax": dict(moe_router_score_function="softmax"),
    "softmax-plain": dict(moe_router_score_function="softmax", norm_topk_prob=False),
    "one-expert": dict(moe_router_topk=1),
    "all-experts": dict(moe_router_topk=8),
    "G4-keep-2": dict(moe_router_num_groups=4, moe_router_group_topk=2),
    "G2-keep-1": dict(moe_router_num_groups=2, moe_router_group_topk=1),
}


@pytest.mark.parametrize("name", CASES)
def test_routing_equals_a_loop(name: str) -> None:
    router = make_router(**CASES[name])
    x = torch.randn(60, 32) * 0.3
    routing = router(x)
    bias = [0.0] * 8 if router.expert_bias is None else router.expert_bias.tolist()
    for row, logits in enumerate((x.double() @ router.weight.double().T).tolist()):
        expected = route_one_row(logits, bias, router.config)
        experts = routing.experts_TK[row].tolist()
        assert set(experts) == set(expected)
        assert routing.weights_TK[row].tolist() == pytest.approx([expected[e] for e in experts], rel=1e-5)


def test_the_bias_chooses_but_does_not_weigh() -> None:
    router = make_router(moe_router_topk=2, norm_topk_prob=False, moe_router_topk_scaling_factor=None)
    assert router.expert_bias is not None
    router.expert_bias.zero_()[5] = 10.0
    routing = router(torch.randn(9, 32))
    assert bool((routing.experts_TK == 5).any(dim=1).all())
    assert bool((routing.weights_TK < 1).all())


def test_router_is_fp32_in_a_bf16_model() -> None:
    router = make_router(params_dtype=torch.bfloat16)
    assert router.weight.dtype == torch.float32 and router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32
    with torch.no_grad():
        router.weight.copy_(router.weight.bfloat16() * (1 + 2**-12))
    x = torch.randn(20, 32).bfloat16()
    routing = router(x)
    assert routing.weights_TK.dtype == torch.float32
    torch.testing.assert_close(routing.scores_TE, (x.float() @ router.weight.T).sigmoid())
    with pytest.raises(ValueError, match="router's weight is torch.bfloat16, but routers are FP32"):
        router.bfloat16()(x)


def test_gradients_by_finite_differences() -> None:
    router = make_router(params_dtype=torch.float64)
    x = torch.randn(4, 32, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(router, {"weight": w}, x).weights_TK, (router.weight,)
    )


def test_counts() -> None:
    experts = torch.tensor([[0, 3], [3, 2], [3, 0]])
    assert count_experts(experts, 5).tolist() == [2, 0, 1, 3, 0]
    assert count_experts(experts[:0], 5).tolist() == [0] * 5


def test_bias_moves_one_step_against_the_overload() -> None:
    router = make_router(num_moe_experts=4, moe_router_bias_update_rate=0.25)
    assert router.expert_bias is not None
    router.expert_bias.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]))
    router.local_tokens_per_expert.copy_(torch.tensor([7, 5, 5, 3]))
    update_expert_bias(nn.ModuleList([router]))
    assert router.expert_bias.tolist() == [-0.25, 1.0, -1.0, 0.75]
    assert router.local_tokens_per_expert.tolist() == [0] * 4
    update_expert_bias(router)
    assert router.expert_bias.tolist() == [-0.25, 1.0, -1.0, 0.75], "no rows, no step"


def test_counting_starts_anew_without_a_bias() -> None:
    router = make_router(moe_router_enable_expert_bias=False)
    assert router.expert_bias is None and "expert_bias" not in router.state_dict()
    router.local_tokens_per_expert.fill_(3)
    update_expert_bias(router)
    assert router.local_tokens_per_expert.sum() == 0


def test_update_sums_loads_over_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's second rank is played by the collective: it saw other experts."""
    router, group = make_router(num_moe_experts=4, moe_router_bias_update_rate=1.0), object()
    assert router.expert_bias is not None
    router.expert_bias.zero_()
    router.local_tokens_per_expert.copy_(torch.tensor([9, 1, 1, 1]))

    def add_other_rank(load: torch.Tensor, group: distributed.ProcessGroup) -> None:
        load += torch.tensor([0, 11, 0, 0])

    monkeypatch.setattr("megatron.core.transformer.moe.router.all_reduce", add_other_rank)
    update_expert_bias(router, group=group)  # type: ignore[arg-type]
    assert router.expert_bias.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_repeated_updates_even_the_load_out() -> None:
    torch.manual_seed(0)
    model = build_gpt_model(tiny_config(num_layers=1, moe_layer_freq=[1], moe_router_bias_update_rate=0.01)).train()
    router = model.decoder.layers[0].mlp.router
    tokens = torch.randint(0, 61, (4, 32))

    def imbalance() -> float:
        model(tokens)
        load = router.local_tokens_per_expert.float()
        assert load.sum() == tokens.numel() * 2
        return (load.max() / load.mean()).item()

    first = imbalance()
    for _ in range(60):
        update_expert_bias(model)
        last = imbalance()
        # Counts of the last pass stay for the next update.
    assert first > 1.15 and last < 1.08
    assert router.expert_bias.abs().max() > 0
