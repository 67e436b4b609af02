"""YaRN's frequencies and factor, bit for bit those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.core.models.common.embeddings import YarnRotaryEmbedding, build_rotary_embedding
from tests.unit_tests.core.tiny_model import tiny_config

POSITIONS = torch.tensor([0, 1, 7, 4097, 131071])

YARN = {
    "deepseek": dict(factor=40.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    "one-sided": dict(factor=8.0, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=1.3),
    "shrunk": dict(factor=0.5, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
}


@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize("name", YARN)
def test_yarn_equals_transformers_bit_for_bit(name: str, dim: int) -> None:
    values = YARN[name]
    rope = dict(rope_type="yarn", rope_theta=10000.0, original_max_position_embeddings=4096, **values)
    theirs = DeepseekV3Config(rope_parameters=rope, max_position_embeddings=163840, qk_rope_head_dim=dim, head_dim=dim)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    config = tiny_config(
        rope_type="yarn",
        dsa_indexer_head_dim=64,
        qk_pos_emb_head_dim=dim,
        rotary_scaling_factor=values["factor"],
        **{k: v for k, v in values.items() if k != "factor"},
    )
    ours = build_rotary_embedding(config)
    assert isinstance(ours, YarnRotaryEmbedding)
    assert torch.equal(ours.frequencies(), frequencies)
    assert ours.factor == pytest.approx(factor, rel=1e-12)
    cos, sin = ours(POSITIONS, torch.float32)
    angles = POSITIONS.float()[:, None] * frequencies
    assert torch.equal(cos, angles.cos() * factor) and torch.equal(sin, angles.sin() * factor)
