"""Module specs: which class builds a part of the model, kept apart from the code that puts the parts together.

A layer names its parts in a dataclass of submodules; a spec fills it in. Another backend (fused layers of a library, a
test's probe) is another spec, and no layer changes. After Megatron-LM's interface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """How to build a module.

    Args:
        module: a class, or any callable that returns a module.
        params: keyword arguments that the spec fixes; the caller's win where both name one.
        submodules: the dataclass of parts, handed to ``module`` as ``submodules``.
    """

    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Build what a ``ModuleSpec`` describes; a class or callable is called as it is.

    Raises:
        TypeError: the arguments do not fit; the message names the class.
    """
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module(*args, **kwargs)
    if spec_or_module.submodules is not None:
        kwargs = {"submodules": spec_or_module.submodules} | kwargs
    return spec_or_module.module(*args, **(spec_or_module.params | kwargs))
