"""The process groups of one rank, passed explicitly from the model down to the layers that communicate.

There is no global registry: a module that needs a group gets it as an argument, so that one process can hold two models
on different meshes and a test can build any layer without set-up. ``None`` stands for a group of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ProcessGroupCollection:
    """Groups by what their ranks share: ``tp`` a layer, ``cp`` a sequence, ``ep`` the experts, ``dp`` the model."""

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    dp: ProcessGroup | None = None
