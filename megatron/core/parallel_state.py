"""From parallel sizes and rank order to process groups.

Ranks count tensor parallelism fastest, then context, then data parallelism, so that the most frequent communication
stays inside a node. Experts have an order of their own over the same ranks: expert parallelism fastest, and the rest
holds copies. An expert is not split any further (expert tensor parallelism is 1): the tensor-parallel ranks of a dense
layer route different rows. Unlike Megatron-LM's module of this name, nothing here is global state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ParallelSizes:
    """Ranks along each axis.

    Raises:
        ValueError: the axes do not divide the world.
    """

    world: int
    tensor: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tensor * self.context):
            raise ValueError(
                f"{self.world} processes do not split into tensor_model_parallel_size={self.tensor} times "
                f"context_parallel_size={self.context}: start a multiple of {self.tensor * self.context} processes "
                "(torchrun --nproc-per-node), or change the sizes."
            )
        if self.world % self.expert:
            raise ValueError(
                f"{self.world} processes do not split into expert_model_parallel_size={self.expert}: start a multiple "
                "of it, or change the size."
            )

    @classmethod
    def of(cls, config: TransformerConfig, world: int) -> ParallelSizes:
        """The sizes that a model asks for."""
        return cls(
            world, config.tensor_model_parallel_size, config.context_parallel_size, config.expert_model_parallel_size
        )

    @property
    def data(self) -> int:
        """Ranks that take different samples."""
        return self.world // (self.tensor * self.context)


def build_process_groups(sizes: ParallelSizes, device_type: str) -> ProcessGroupCollection:
    """The groups of this rank; collective, so every rank of the world calls it with the same sizes.

    One process needs no ``torch.distributed`` and gets groups that are all None.

    Args:
        sizes: of the axes; the world must be the default process group's.
        device_type: of the tensors that are sent, "cpu" or "cuda".
    """
    if sizes.world == 1:
        return ProcessGroupCollection()
    shape = (sizes.data, sizes.context, sizes.tensor)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "cp", "tp"))
    rows = mesh["dp", "cp"]._flatten("dp_cp")
    expert_shape = (sizes.world // sizes.expert, sizes.expert)
    expert_mesh = init_device_mesh(device_type, expert_shape, mesh_dim_names=("edp", "ep"))
    return ProcessGroupCollection(
        tp=_group(mesh["tp"]),
        cp=_group(mesh["cp"]),
        tp_cp=_group(mesh["cp", "tp"]._flatten("tp_cp")),
        dp=_group(mesh["dp"]),
        dp_cp=_group(rows),
        ep=_group(expert_mesh["ep"]),
        edp=_group(expert_mesh["edp"]),
        world=dist.group.WORLD,
        mesh=mesh,
        row_mesh=rows,
        expert_mesh=expert_mesh,
    )


def _group(mesh: DeviceMesh) -> ProcessGroup | None:
    return None if mesh.size() == 1 else mesh.get_group()
