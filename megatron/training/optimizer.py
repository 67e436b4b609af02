"""AdamW over the parameters that train, with the weight-decay groups and the gradient clipping of Megatron-LM.

Parameters are FP32 (``compute_params.py`` makes the BF16 copies that a pass computes with), so the moments are FP32
and no second master copy exists. A parameter that needs no gradient, such as a frozen indexer's, is absent: it
costs no state, and its moments start fresh when a later run trains it. State is exchanged by parameter name, never
by position, so that such a change between two runs leaves every other parameter's moments in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron.training.config import OptimizerConfig

State = dict[str, dict[str, Tensor]]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of them, not to norm weights or biases."""
    return parameter.ndim > 1 and not name.endswith(".bias")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in two groups; the learning rate is set before each step.

    Raises:
        ValueError: nothing in the model trains.
    """
    trained = trained_parameters(model)
    if not trained:
        raise ValueError("No parameter of the model needs a gradient: unfreeze some before training.")
    groups = [
        {"params": [p for name, p in trained.items() if decays(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained.items() if not decays(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr or 0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of the whole gradient, FP32 scalar."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of norm ``norm`` down to ``max_norm``; 0 leaves them alone."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state of every parameter that has been stepped, by name."""
    names = trained_parameters(model)
    return {name: dict(optimizer.state[p]) for name, p in names.items() if optimizer.state.get(p)}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, dict]) -> None:
    """Take over the given parameters' state and let all others start fresh."""
    optimizer.state.clear()
    for name, parameter in trained_parameters(model).items():
        if name in state:
            optimizer.state[parameter] = dict(state[name])
