"""The one per-microbatch argument of block, layer and attention; it lives with DSA, which owns most of its contents."""

from megatron.core.transformer.experimental_attention_variant.dsa.context import ForwardContext

__all__ = ["ForwardContext"]
