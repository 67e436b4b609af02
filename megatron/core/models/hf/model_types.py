"""The two Hugging Face model types that this package reads and writes, and where they differ.

Both are one architecture; everything that the model type alone decides stands in ``ModelType``. The defaults are those
of the released models' config classes (transformers 5.24.0), which a config.json may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Both config classes fix these two epsilons in code, whatever rms_norm_eps says.
LATENT_NORM_EPSILON = 1e-6
INDEXER_K_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class ModelType:
    """One Hugging Face model type.

    ``indexer_rope_interleave``: rotary pairs of the indexer are neighbours (True) or halves (False).
    ``shares_index``: layers may reuse the selected keys of an earlier layer.
    """

    name: str
    architecture: str
    indexer_rope_interleave: bool
    shares_index: bool
    defaults: Mapping[str, Any]


_COMMON = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "index_topk": 2048,
    "index_head_dim": 128,
    "first_k_dense_replace": 3,
}

_GLM = {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}

_DEEPSEEK = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "index_n_heads": 64,
}

GLM = ModelType("glm_moe_dsa", "GlmMoeDsaForCausalLM", True, True, MappingProxyType(_COMMON | _GLM))
DEEPSEEK = ModelType("deepseek_v32", "DeepseekV32ForCausalLM", False, False, MappingProxyType(_COMMON | _DEEPSEEK))

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType({kind.name: kind for kind in (GLM, DEEPSEEK)})
