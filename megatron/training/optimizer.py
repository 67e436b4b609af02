"""AdamW over the parameters that train, with the weight-decay groups and the gradient clipping of Megatron-LM.

Parameters are FP32 (``compute_params.py`` makes the BF16 copies that a pass computes with), so the moments are FP32
and no second master copy exists. A parameter that needs no gradient, such as a frozen indexer's, is absent: it
costs no state, and its moments start fresh when a later run trains it. State is exchanged by parameter name, never
by position, so that such a change between two runs leaves every other parameter's moments in place.

Sharded parameters (DTensors) are stepped shard by shard, and the norm is that of the whole gradient: every element
counts once, on whichever rank, and elements that several ranks hold count on the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import group_rank, group_size
from megatron.core.tensor_parallel.shards import local_part
from megatron.training.config import OptimizerConfig

State = dict[str, dict[str, Tensor]]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that need a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of them, not to norm weights or biases."""
    return parameter.ndim > 1 and not name.endswith(".bias")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW, with and without weight decay; the learning rate is set before each step.

    Parameters that are sharded over different ranks are groups of their own: one fused update takes one mesh.

    Raises:
        ValueError: nothing in the model trains.
    """
    trained = trained_parameters(model)
    if not trained:
        raise ValueError("No parameter of the model needs a gradient: unfreeze some before training.")
    members: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for with_decay in (True, False):
        for name, parameter in trained.items():
            if decays(name, parameter) == with_decay:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                members.setdefault((with_decay, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": p, "weight_decay": config.weight_decay if key[0] else 0.0} for key, p in members.items()],
        lr=config.lr or 0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[nn.Parameter], groups: ProcessGroupCollection | None = None) -> Tensor:
    """2-norm of the whole gradient over all ranks of ``groups``, FP32 scalar, the same on each of them."""
    with_gradients = [p for p in parameters if p.grad is not None]
    if groups is None or groups.world is None:
        return torch.nn.utils.get_total_norm([p.grad for p in with_gradients if p.grad is not None])
    own = [local_part(p.grad) for p in with_gradients if p.grad is not None and _counts_here(p, groups)]
    squares = torch.stack(torch._foreach_norm(own)).square().sum() if own else torch.zeros((), device=_device(groups))
    dist.all_reduce(squares, group=groups.world)
    return squares.sqrt()


def _counts_here(parameter: Tensor, groups: ProcessGroupCollection) -> bool:
    """Whether this rank's shard is no copy of another rank's."""
    assert isinstance(parameter, DTensor), "every parameter of a model on several ranks is sharded"
    return parameter.device_mesh.size() == group_size(groups.world) or group_rank(groups.tp) == 0


def _device(groups: ProcessGroupCollection) -> str:
    assert groups.mesh is not None
    return groups.mesh.device_type


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients of norm ``norm`` down to ``max_norm``; 0 leaves them alone."""
    parameters = list(parameters)
    if max_norm <= 0:
        return
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([local_part(p.grad) for p in parameters if p.grad is not None], factor)


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
