"""AdamW against the textbook, who decays and who trains, and state that travels by name."""

import pytest
import torch
from torch import nn

from megatron.training.config import OptimizerConfig
from megatron.training.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
    trained_parameters,
)
from tests.unit_tests.training.models import build

INDEXER = "decoder.layers.0.self_attention.core_attention.indexer"


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
        self.bias = nn.Parameter(torch.tensor([3.0]))


def test_a_step_by_hand() -> None:
    model = Pair()
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5, adam_beta1=0.8, adam_beta2=0.9))
    expected = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in expected.items()}
    for step, rate in ((1, 0.1), (2, 0.05)):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, 0.3 * step)
            first, second = moments[name]
            first.mul_(0.8).add_(0.2 * 0.3 * step)
            second.mul_(0.9).add_(0.1 * (0.3 * step) ** 2)
            update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
            decay = 0.5 if name == "weight" else 0.0
            expected[name] = expected[name] * (1 - rate * decay) - rate * update
        set_learning_rate(optimizer, rate)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.double(), expected[name], atol=1e-6), name


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build()
    decaying, still = build_optimizer(model, OptimizerConfig(lr=1.0)).param_groups
    assert (decaying["weight_decay"], still["weight_decay"]) == (0.01, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in still["params"]} == {
        name for name, p in model.named_parameters() if "norm" in name and p.requires_grad
    }
    assert f"{INDEXER}.k_norm.bias" in {names[p] for p in still["params"]}
    assert len(decaying["params"]) + len(still["params"]) == len(trained_parameters(model))


def test_a_frozen_indexer_is_absent() -> None:
    model = build(dsa_indexer_loss_coeff=None, dsa_indexer_use_sparse_loss=False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    frozen = [name for name, p in model.named_parameters() if id(p) not in held]
    assert frozen and all(name.startswith(INDEXER) for name in frozen)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="No parameter of the model needs a gradient"):
        build_optimizer(build().requires_grad_(False), OptimizerConfig(lr=1.0))


def test_clipping_scales_the_whole_gradient() -> None:
    model = Pair()
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    assert norm.item() == 5
    clip_gradients(parameters, 0.0, norm)
    assert model.bias.grad.item() == 4
    clip_gradients(parameters, 10.0, norm)
    assert model.bias.grad.item() == 4
    clip_gradients(parameters, 1.0, norm)
    assert (model.weight.grad[0, 0].item(), model.bias.grad.item()) == pytest.approx((0.6, 0.8), rel=1e-5)


def test_state_travels_by_name_and_what_has_none_starts_fresh() -> None:
    source, target = build(), build(seed=1)
    optimizers = [build_optimizer(model, OptimizerConfig(lr=0.1)) for model in (source, target)]
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    state = optimizer_state(source, optimizers[0])
    assert set(state) == set(trained_parameters(source))
    dropped = "output_layer.weight"
    load_optimizer_state(target, optimizers[1], {name: s for name, s in state.items() if name != dropped})
    loaded = optimizer_state(target, optimizers[1])
    assert set(loaded) == set(state) - {dropped}
    assert all(torch.equal(loaded[name]["exp_avg"], state[name]["exp_avg"]) for name in loaded)
    load_optimizer_state(target, optimizers[1], {})
    assert optimizer_state(target, optimizers[1]) == {}
