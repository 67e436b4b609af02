"""The table of DSA backends: a name, and where its class lives. Nothing is imported before it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .protocol import Backend

_PACKAGE = __name__.rpartition(".")[0]
_BACKENDS = {
    "none": f"{_PACKAGE}.reference:ReferenceBackend",
    "cudnn": f"{__name__}.cudnn:CudnnBackend",
}


def backend_names() -> tuple[str, ...]:
    """Names that ``dsa_kernel_backend`` accepts."""
    return tuple(_BACKENDS)


def resolve(name: str) -> type[Backend]:
    """The backend class called ``name``.

    Raises:
        ValueError: no backend has that name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"dsa_kernel_backend={name!r} is unknown: use one of {', '.join(_BACKENDS)}.")
    module, _, attribute = _BACKENDS[name].partition(":")
    backend: type[Backend] = getattr(import_module(module), attribute)
    return backend
