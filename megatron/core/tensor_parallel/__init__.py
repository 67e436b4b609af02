"""Linear layers, vocabulary layers and their initialization, in the shapes that tensor parallelism shards."""

from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.initialization import (
    init_method_normal,
    initialize_weights,
    scaled_init_method_normal,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "init_method_normal",
    "initialize_weights",
    "scaled_init_method_normal",
    "vocab_parallel_cross_entropy",
]
