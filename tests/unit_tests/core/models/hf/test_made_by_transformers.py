"""Models that transformers makes and saves, of shapes and options that no golden model has: imported, same logits.

The golden files fix the numbers of four models; here transformers computes at test time, so any option can be tried.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.core.models.common.embeddings.rope_utils import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf import from_pretrained
from tests.unit_tests.core.models.hf.observe import clear_cut
from tests.unit_tests.core.models.hf.test_pretrained import transformers_logits

BASE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "index_n_heads": 5,
    "index_head_dim": 10,
    "index_topk": 5,
    "first_k_dense_replace": 1,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-odd-shapes": ("glm_moe_dsa", {}),
    "deepseek-plain-rope": ("deepseek_v32", {}),
    "yarn-factor-above-1": ("deepseek_v32", {"rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.7}}),
    "yarn-factor-below-1": ("glm_moe_dsa", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn-attention-factor": ("deepseek_v32", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "yarn-without-mscale": ("deepseek_v32", {"rope_parameters": YARN}),
    "two-shared-experts": ("glm_moe_dsa", {"n_shared_experts": 2}),
    "no-renormalization": ("glm_moe_dsa", {"norm_topk_prob": False}),
    "one-expert-renormalized": ("glm_moe_dsa", {"num_experts_per_tok": 1}),
    "one-expert-not-renormalized": ("deepseek_v32", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "three-groups-keep-two": ("glm_moe_dsa", {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}),
    "groups-all-kept": ("deepseek_v32", {"n_group": 2, "topk_group": 2}),
    "no-routed-scaling": ("glm_moe_dsa", {"routed_scaling_factor": 1.0}),
    "all-dense": ("glm_moe_dsa", {"first_k_dense_replace": 3}),
    "all-sparse": ("deepseek_v32", {"first_k_dense_replace": 0}),
    "dense-between": ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "shared-selection": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}),
    "tied-embeddings": ("glm_moe_dsa", {"tie_word_embeddings": True}),
    "large-epsilon": ("deepseek_v32", {"rms_norm_eps": 1e-2}),
}


def make(case: str, folder: Path, max_shard_size: str = "5GB") -> None:
    """A random model of transformers, with the parameters that it initializes to constants drawn too."""
    model_type, changes = CASES[case]
    torch.manual_seed(len(case))
    config = AutoConfig.for_model(model_type, **BASE | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for name, tensor in model.state_dict().items():
        if "norm" in name or name.endswith("e_score_correction_bias"):
            tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def largest_difference(model: GPTModel, folder: Path) -> float:
    input_ids = clear_cut(model.eval())
    with torch.no_grad():
        return float((model(input_ids) - transformers_logits(folder, input_ids)).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_import_gives_transformers_logits(case: str, tmp_path: Path) -> None:
    make(case, tmp_path)
    assert largest_difference(from_pretrained(tmp_path), tmp_path) < 5e-4


def test_shards_that_transformers_writes(tmp_path: Path) -> None:
    make("glm-odd-shapes", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert largest_difference(from_pretrained(tmp_path), tmp_path) < 5e-4


@pytest.mark.parametrize("case", ["yarn-factor-above-1", "yarn-factor-below-1"])
def test_the_yarn_factor_reaches_the_indexer(case: str, tmp_path: Path) -> None:
    """Golden models have a factor of 1; with another, an indexer without it must show."""
    make(case, tmp_path)
    model = from_pretrained(tmp_path)
    for layer in model.decoder.layers:
        rotary = layer.self_attention.core_attention.indexer.rotary
        assert isinstance(rotary, RotaryEmbedding) and abs(rotary.factor - 1) > 0.05
        rotary.factor = 1.0
    assert largest_difference(model, tmp_path) > 1e-2
