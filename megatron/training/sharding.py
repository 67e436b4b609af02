"""Fully sharded data parallelism (FSDP2) over the ranks that hold different rows.

Parameters are FP32 shards; a layer's are gathered in the compute type while it runs, and its gradients are summed over
the ranks in FP32 into the shards. They are *summed*, never averaged: every loss is divided by its normalizer before it
is back-propagated. So it trains the numbers that ``compute_params.py`` trains in one process, which needs none of this.

Who is sharded over whom:

    dense, split over tp        DTensor on tp, sharded over dp_cp
    dense, whole on each tp rank sharded over dp_cp; gradients of marked ones are summed over tp once a step
    experts, split over ep      DTensor on ep, sharded over edp: all ranks, since tensor-parallel ranks route other rows

Parameters that compute in FP32 are groups of their own. Module inputs are not cast: activations carry their own types.

A model is built on the meta device, sharded, and only then given memory, so that no rank ever holds more than its
shards and one whole weight (which is drawn whole, so that weights do not depend on the number of ranks).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel.initialization import initialize_weights
from megatron.core.tensor_parallel.mappings import group_size
from megatron.core.tensor_parallel.shards import local_part, split_of, sums_gradient_over_tp
from megatron.core.transformer.moe.experts import GroupedMLP


class ShardedCompute:
    """Stands where one process has ``ComputeParams``: FSDP casts parameters and accumulates gradients by itself.

    Args:
        model: after ``shard_model``.
        partial: names of the parameters whose gradients are partial on each tensor-parallel rank.
        groups: of the model.
    """

    def __init__(self, model: nn.Module, partial: frozenset[str], groups: ProcessGroupCollection) -> None:
        self._model, self._partial, self._groups = model, partial, groups

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Nothing to install."""
        yield

    def accumulate(self) -> None:
        """Nothing to add up."""

    @torch.no_grad()
    def finish(self) -> None:
        """Sum partial gradients over tensor-parallel ranks, in one message; called once a step."""
        if group_size(self._groups.tp) == 1:
            return
        parameters = self._model.named_parameters()
        gradients = [local_part(p.grad) for name, p in parameters if name in self._partial and p.grad is not None]
        if not gradients:  # every partial parameter is frozen, on all ranks alike
            return
        message = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(message, group=self._groups.tp)
        for gradient, total in zip(gradients, message.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def shard_model(model: GPTModel, groups: ProcessGroupCollection) -> ShardedCompute:
    """Shard a model with FP32 parameters in place; on the meta device for models that fit on no rank."""
    assert groups.mesh is not None and groups.row_mesh is not None and groups.expert_mesh is not None
    config = model.config
    # By name: sharding, and giving a model memory, put other objects in the parameters' places.
    partial = frozenset(name for name, parameter in model.named_parameters() if sums_gradient_over_tp(parameter))
    _make_dtensors(model, {"tp": groups.mesh["tp"], "ep": groups.expert_mesh["ep"]})
    rows, experts = groups.row_mesh, groups.expert_mesh["edp"]
    for path, module in model.named_modules():
        if isinstance(module, GroupedMLP):
            _shard(module, experts, config.params_dtype)
        elif any(config.computes_in_fp32(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False)):
            _shard(module, rows, torch.float32)
    for layer in model.decoder.layers:
        _shard(layer, rows, config.params_dtype)
    _shard(model, rows, config.params_dtype)
    return ShardedCompute(model, partial, groups)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model that was sharded on the meta device memory and its initial weights."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    initialize_weights(model)


def _make_dtensors(model: nn.Module, meshes: dict[str, DeviceMesh]) -> None:
    """Say of every split parameter, by its type, what it is a part of."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = split_of(parameter)
            if split is None:
                continue
            part = DTensor.from_local(parameter.detach(), meshes[split.axis], [Shard(split.dim)], run_check=False)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def _shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """One FSDP group of the module's parameters that are in no group yet; computes in ``dtype``."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda p: _placement(p, mesh.size()))
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _placement(parameter: nn.Parameter, ranks: int) -> Shard:
    """The first dimension that splits evenly, as FSDP wants of all but the first."""
    shape = local_part(parameter).shape
    return Shard(next((dim for dim, length in enumerate(shape) if length % ranks == 0), 0))
