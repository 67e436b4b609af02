"""The process groups of one rank, passed explicitly from the model down to the layers that communicate.

There is no global registry: a module that needs a group gets it as an argument, so that one process can hold two models
on different meshes and a test can build any layer without set-up. ``None`` stands for a group of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ProcessGroupCollection:
    """Groups by what their ranks share out; ``parallel_state.py`` makes them.

    Attributes:
        tp: one layer's weights, and rows between layers with sequence parallelism.
        cp: one sequence's rows.
        tp_cp: the rows and heads of one pass, and so its documents.
        dp: the samples of a step.
        dp_cp: the rows of a step; dense parameters are sharded over it.
        ep: the experts of a layer.
        edp: ranks that hold the same experts; their parameters are sharded over it.
        world: every rank.
        mesh: ``("dp", "cp", "tp")`` over the world; None in one process.
        row_mesh: ``("dp_cp",)``, flattened out of it.
        expert_mesh: ``("edp", "ep")`` over the world.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    tp_cp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    edp: ProcessGroup | None = None
    world: ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    row_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
