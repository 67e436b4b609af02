"""Rotary position embeddings."""

from megatron.core.models.common.embeddings.rope_utils import (
    RotaryEmbedding,
    YarnRotaryEmbedding,
    apply_rotary_pos_emb,
    build_rotary_embedding,
    softmax_scale,
)

__all__ = [
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "apply_rotary_pos_emb",
    "build_rotary_embedding",
    "softmax_scale",
]
