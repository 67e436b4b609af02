"""Routed experts against one small MLP after another, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transformer.moe.experts import GroupedMLP, grouped_linear
from megatron.core.transformer.moe.router import Routing
from tests.unit_tests.core.tiny_model import tiny_config


def make_experts(**overrides: object) -> GroupedMLP:
    return GroupedMLP(tiny_config(**({"params_dtype": torch.float64, "num_moe_experts": 5} | overrides)))


def make_routing(experts: list[list[int]], dtype: torch.dtype = torch.float64) -> Routing:
    experts_TK = torch.tensor(experts, dtype=torch.int64).view(len(experts), -1)
    weights_TK = torch.rand(experts_TK.shape, dtype=dtype).add_(0.1).requires_grad_()
    return Routing(experts_TK, weights_TK, torch.zeros(len(experts), 5, dtype=dtype))


def run_one_by_one(module: GroupedMLP, x: Tensor, routing: Routing) -> Tensor:
    rows = []
    for row, experts, weights in zip(x, routing.experts_TK.tolist(), routing.weights_TK, strict=True):
        out = torch.zeros_like(row)
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = module.linear_fc1.weight[expert] @ row
            out = out + weight * (module.linear_fc2.weight[expert] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows)


CASES = {
    "mixed": [[0, 3], [3, 2], [4, 0], [0, 3], [2, 4], [3, 0], [0, 4]],
    "one-expert-each": [[1], [0], [4], [1], [1]],
    "all-on-one": [[2], [2], [2]],
    "one-row": [[4, 1, 0]],
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_a_loop(name: str) -> None:
    module, routing = make_experts(), make_routing(CASES[name])
    x = torch.randn(len(CASES[name]), 32, dtype=torch.float64, requires_grad=True)
    output, load_E = module(x, routing)
    assert load_E.tolist() == [sum(row.count(e) for row in CASES[name]) for e in range(5)]
    expected = run_one_by_one(module, x, routing)
    torch.testing.assert_close(output, expected)
    inputs = (x, routing.weights_TK, *module.parameters())
    probe = torch.randn_like(output)
    actual_gradients = torch.autograd.grad((output * probe).sum(), inputs)
    torch.testing.assert_close(actual_gradients, torch.autograd.grad((expected * probe).sum(), inputs))


def test_no_rows_give_no_output_and_zero_gradients() -> None:
    module = make_experts()
    x = torch.zeros(0, 32, dtype=torch.float64, requires_grad=True)
    output, load_E = module(x, Routing(torch.zeros(0, 2, dtype=torch.int64), x.new_zeros(0, 2), x.new_zeros(0, 5)))
    assert output.shape == (0, 32) and load_E.sum() == 0
    output.sum().backward()
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in module.parameters())


def test_bf16_rounds_the_weighted_activation_once() -> None:
    module = make_experts(params_dtype=torch.bfloat16)
    routing = make_routing([[0, 3], [3, 2]], torch.float32)
    x = torch.randn(2, 32).bfloat16()
    output, _ = module(x, routing)
    expected = run_one_by_one(module.float(), x.float(), routing)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=2e-2 * expected.abs().max().item(), rtol=0)


def test_reruns_are_bitwise_equal() -> None:
    module, routing = make_experts(params_dtype=torch.float32), make_routing([[0, 3], [3, 2], [0, 3]], torch.float32)
    x = torch.randn(3, 32, requires_grad=True)
    first, again = (torch.autograd.grad(module(x, routing)[0].square().sum(), x)[0] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.gpu
def test_grouped_products_on_a_gpu_equal_the_loop() -> None:
    sizes = torch.tensor([5, 0, 120, 3])
    x = torch.randn(128, 64).bfloat16()
    weight = torch.randn(4, 48, 64).bfloat16()
    probe = torch.randn(128, 48).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        inputs = [t.to(device).requires_grad_() for t in (x, weight)]
        out = grouped_linear(*inputs, sizes.cumsum(0).to(device, torch.int32))
        results.append([t.cpu().float() for t in (out, *torch.autograd.grad(out, inputs, probe.to(device)))])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=0.02 * expected.abs().max().item(), rtol=0)


@pytest.mark.gpu
def test_a_width_that_grouped_products_cannot_take_is_one_sentence() -> None:
    x, ends = torch.zeros(4, 12, device="cuda").bfloat16(), torch.tensor([2, 4], device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="8 x 12 in torch.bfloat16.*make hidden_size and .* multiples of 8"):
        grouped_linear(x, torch.zeros(2, 8, 12, device="cuda").bfloat16(), ends)
