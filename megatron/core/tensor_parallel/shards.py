"""How a parameter is shared out over ranks, said on the parameter itself.

A layer that holds its own part of a weight builds it with ``split_parameter``, which notes the axis (``"tp"`` or
``"ep"``), the dimension and the rank. Whoever shards the model over data-parallel ranks reads the note and makes the
parameter a DTensor of its whole shape, so that checkpoints know where each part belongs; layers compute with
``local_part``, which is the same numbers either way.

A weight that every tensor-parallel rank holds whole, but that sees only the rank's own rows, gets a partial gradient on
each rank. ``sum_gradient_over_tp`` marks it, and the gradients of marked parameters are summed over tensor-parallel
ranks once a step. Replicated weights that see all rows are not marked: their gradients are whole and equal already.

Drawing the initial weights draws the *whole* weight and keeps the own part, so that a model starts from the same
numbers however it is split; it takes one whole weight of memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron.core.tensor_parallel.mappings import group_rank, group_size


@dataclass(frozen=True)
class ParameterSplit:
    """Part ``rank`` of ``size`` equal parts along dimension ``dim``, shared out over the axis's ranks."""

    axis: Literal["tp", "ep"]
    dim: int
    rank: int
    size: int


def split_parameter(
    shape: Sequence[int], dtype: torch.dtype, group: ProcessGroup | None, dim: int, axis: Literal["tp", "ep"] = "tp"
) -> nn.Parameter:
    """Own part of a parameter of ``shape``, uninitialized; the whole parameter where the group is one rank.

    Raises:
        ValueError: the dimension does not split evenly.
    """
    ranks, own = group_size(group), list(shape)
    if own[dim] % ranks:
        raise ValueError(
            f"A weight of shape {list(shape)} does not split over {ranks} ranks in dimension {dim}: make it a multiple "
            f"of {'tensor' if axis == 'tp' else 'expert'}_model_parallel_size."
        )
    own[dim] //= ranks
    parameter = nn.Parameter(torch.empty(own, dtype=dtype))
    if ranks > 1:
        parameter.parameter_split = ParameterSplit(axis, dim, group_rank(group), ranks)  # type: ignore[attr-defined]
    return parameter


def split_of(parameter: Tensor) -> ParameterSplit | None:
    """What ``split_parameter`` noted."""
    return getattr(parameter, "parameter_split", None)


def sum_gradient_over_tp(*parameters: nn.Parameter | None) -> None:
    """Mark replicated parameters whose gradients are partial on each tensor-parallel rank."""
    for parameter in parameters:
        if parameter is not None:
            parameter.tensor_parallel_grad = "sum"  # type: ignore[attr-defined]


def sums_gradient_over_tp(parameter: Tensor) -> bool:
    """Whether ``parameter`` is marked."""
    return getattr(parameter, "tensor_parallel_grad", None) == "sum"


def local_part(parameter: Tensor) -> Tensor:
    """What this rank computes with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def own_region(parameter: Tensor) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """The parameter's whole shape, and the region of it that this rank holds."""
    if isinstance(parameter, DTensor):
        shape = tuple(parameter.shape)
        own, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        return shape, tuple(slice(start, start + length) for start, length in zip(offset, own, strict=True))
    split, own = split_of(parameter), tuple(parameter.shape)
    region = [slice(0, length) for length in own]
    if split is None:
        return own, tuple(region)
    start = split.rank * own[split.dim]
    region[split.dim] = slice(start, start + own[split.dim])
    whole = [length * split.size if dim == split.dim else length for dim, length in enumerate(own)]
    return tuple(whole), tuple(region)


@torch.no_grad()
def draw(parameter: Tensor, init_method: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Fill own part with what ``init_method`` draws for the whole parameter in ``dtype``."""
    if split_of(parameter) is None and not isinstance(parameter, DTensor):
        init_method(parameter)
        return
    whole, region = own_region(parameter)
    drawn = init_method(torch.empty(whole, dtype=dtype, device=parameter.device))
    local_part(parameter).copy_(drawn[region])
