"""Collectives with gradients, as tensor-parallel layers import them; they live with DSA, which stands alone."""

from megatron.core.transformer.experimental_attention_variant.dsa.collectives import (
    all_gather_rows,
    copy_to_tensor_parallel,
    gather_rows,
    group_rank,
    group_size,
    own_rows,
    permute_rows,
    reduce_from_tensor_parallel,
    reduce_scatter_rows,
    slice_rows,
    sum_scatter_rows,
)

__all__ = [
    "all_gather_rows",
    "copy_to_tensor_parallel",
    "gather_rows",
    "group_rank",
    "group_size",
    "own_rows",
    "permute_rows",
    "reduce_from_tensor_parallel",
    "reduce_scatter_rows",
    "slice_rows",
    "sum_scatter_rows",
]
