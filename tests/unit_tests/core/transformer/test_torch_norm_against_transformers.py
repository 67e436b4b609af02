"""RMSNorm in BF16, bit for bit that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from megatron.core.transformer.torch_norm import RMSNorm
from tests.unit_tests.core.tiny_model import tiny_config


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_bf16_rounds_where_transformers_rounds(eps: float) -> None:
    ours = RMSNorm(tiny_config(params_dtype=torch.bfloat16), 64, eps=eps)
    theirs = GlmMoeDsaRMSNorm(64, eps=eps).bfloat16()
    with torch.no_grad():
        ours.weight.uniform_(0.2, 5.0)
        theirs.weight.copy_(ours.weight)
    x = torch.randn(200, 64).bfloat16() * 1e-2
    assert torch.equal(ours(x), theirs(x))
