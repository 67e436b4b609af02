"""BF16 compute on FP32 parameters.

The model's parameters are FP32: the optimizer steps them and checkpoints hold them. For the passes of a step, each
is replaced by a BF16 copy, a leaf of its own; after every backward pass the copy's gradient is added to the FP32
parameter's. This is what FSDP2's mixed precision does with its unsharded parameters, so both train the same
numbers, and a resume needs nothing but the FP32 parameters. Copies stay in place until backward has ended, because
activation recompute reads them again. Parameters that must compute in FP32 (``fp32_islands``) are left as they are.

Left out: a BF16 model with FP32 masters inside the optimizer, which would keep two truths to save and to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Copy(NamedTuple):
    module: nn.Module
    name: str
    parameter: nn.Parameter
    copy: nn.Parameter


class ComputeParams:
    """Swaps a model's FP32 parameters for copies in ``dtype`` while passes run; with FP32 it does nothing."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, fp32_islands: Callable[[str], bool]) -> None:
        self._copies: list[_Copy] = []
        if dtype == torch.float32:
            return
        shared: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if fp32_islands(f"{path}.{name}"):
                    continue
                if parameter not in shared:
                    shared[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                self._copies.append(_Copy(module, name, parameter, shared[parameter]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Refresh the copies and compute with them inside."""
        self._refresh()
        self._install(copies=True)
        try:
            yield
        finally:
            self._install(copies=False)

    def accumulate(self) -> None:
        """Add the copies' gradients to the FP32 parameters', and drop them; called after each backward pass."""
        for entry in self._copies:
            gradient, entry.copy.grad = entry.copy.grad, None
            if gradient is None:
                continue
            if entry.parameter.grad is None:
                entry.parameter.grad = gradient.float()
            else:
                entry.parameter.grad += gradient

    def finish(self) -> None:
        """Nothing is left to do after the last backward pass of a step."""

    @torch.no_grad()
    def _refresh(self) -> None:
        for entry in self._copies:
            entry.copy.copy_(entry.parameter)

    def _install(self, copies: bool) -> None:
        for entry in self._copies:
            entry.module._parameters[entry.name] = entry.copy if copies else entry.parameter


def as_fp32(model: nn.Module) -> nn.Module:
    """Make every parameter FP32, whatever dtype the model was built in."""
    for parameter in model.parameters():
        parameter.data = _fp32(parameter.data)
    return model


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
