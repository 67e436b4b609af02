"""Absorbed MLA against the paper's formula with keys and values of every head written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.common.embeddings import apply_rotary_pos_emb, softmax_scale
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from tests.unit_tests.core.tiny_model import context_of, tiny_config

DENSE: dict[str, Any] = {"experimental_attention_variant": None}


class Probe(nn.Module):
    """A core attention that keeps what it was given."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float, pg_collection: Any = None) -> None:
        super().__init__()
        self.heads, self.value, self.softmax_scale = config.num_attention_heads, config.v_head_dim, softmax_scale
        self.given: dict[str, Any] = {}

    def forward(self, query: Tensor, key: Tensor, **given: Any) -> Tensor:
        self.given = {"query": query, "key": key, **given}
        return query.new_zeros(query.shape[0], self.heads * self.value)


def make_attention(core: Any = None, **overrides: Any) -> MLASelfAttention:
    config = tiny_config(**({"params_dtype": torch.float64} | DENSE | overrides))
    spec = get_gpt_decoder_block_spec(config).layer_specs[0].submodules.self_attention
    if core is not None:
        spec.submodules.core_attention = core
    attention = build_module(spec, config=config, layer_number=1)
    assert isinstance(attention, MLASelfAttention)
    with torch.no_grad():
        for norm in (attention.q_layernorm, attention.kv_layernorm):
            norm.weight.uniform_(0.2, 5.0)
    return attention


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attend_head_by_head(module: MLASelfAttention, x: Tensor) -> Tensor:
    """One document ``[t, hidden]``, not absorbed: every head has keys and values of its own."""
    config = module.config
    nope, rope, value = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
    eps = (
        config.layernorm_epsilon
        if config.attention_latent_norm_epsilon is None
        else config.attention_latent_norm_epsilon
    )
    cos, sin = module.rotary(torch.arange(len(x)), x.dtype)
    q_latent = rms(x @ module.linear_q_down_proj.weight.T, module.q_layernorm.weight, eps)
    down = x @ module.linear_kv_down_proj.weight.T
    kv_latent = rms(down[:, : config.kv_lora_rank], module.kv_layernorm.weight, eps)
    k_rope = apply_rotary_pos_emb(down[:, config.kv_lora_rank :], cos, sin, config.mla_rotary_interleaved)
    hidden_mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    outputs = []
    for head in range(config.num_attention_heads):
        q_up = module.linear_q_up_proj.weight.view(-1, nope + rope, config.q_lora_rank)[head]
        kv_up = module.linear_kv_up_proj.weight.view(-1, nope + value, config.kv_lora_rank)[head]
        q, k_nope, v = q_latent @ q_up.T, kv_latent @ kv_up[:nope].T, kv_latent @ kv_up[nope:].T
        q = torch.cat((q[:, :nope], apply_rotary_pos_emb(q[:, nope:], cos, sin, config.mla_rotary_interleaved)), dim=1)
        logits = q @ torch.cat((k_nope, k_rope), dim=1).T * softmax_scale(config)
        outputs.append(logits.masked_fill(hidden_mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, dim=1) @ module.linear_proj.weight.T


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": dict(rope_type="yarn", mscale_all_dim=0.8, original_max_position_embeddings=8, rotary_scaling_factor=4.0),
    "half-split": dict(mla_rotary_interleaved=False),
    "latent-epsilon": dict(attention_latent_norm_epsilon=0.1),
}


@pytest.mark.parametrize("name", [*VARIANTS, "no-rope", "no-rope-yarn"])
def test_absorbed_attention_equals_heads_written_out(name: str) -> None:
    no_rope = {"qk_pos_emb_head_dim": 0, "rope_type": "yarn" if name == "no-rope-yarn" else "rope"}
    module = make_attention(**VARIANTS.get(name, no_rope))
    x = torch.randn(14, 32, dtype=torch.float64, requires_grad=True)
    packed = PackedSeqParams.from_offsets((0, 9, 9, 14))
    actual = module(x, context_of(packed=packed))
    expected = torch.cat([attend_head_by_head(module, part) for part in (x[:9], x[9:])])
    torch.testing.assert_close(actual, expected)
    inputs, probe = [x, *module.parameters()], torch.randn_like(actual)
    actual_gradients = torch.autograd.grad((actual * probe).sum(), inputs)
    torch.testing.assert_close(actual_gradients, torch.autograd.grad((expected * probe).sum(), inputs))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_variants_differ(name: str) -> None:
    x = torch.randn(14, 32, dtype=torch.float64)
    torch.manual_seed(0)
    plain = make_attention()
    other = make_attention(**VARIANTS[name])
    other.load_state_dict(plain.state_dict())
    same = torch.allclose(plain(x, context_of(1, 14)), other(x, context_of(1, 14)))
    assert same == (name == "plain")


def test_selecting_every_key_is_dense_attention() -> None:
    x = torch.randn(2 * 6, 32, dtype=torch.float64)
    sparse = make_attention(experimental_attention_variant="dsa", dsa_indexer_topk=6).eval()
    dense = make_attention()
    dense.load_state_dict(sparse.state_dict(), strict=False)
    torch.testing.assert_close(sparse(x, context_of(2, 6)), dense(x, context_of(2, 6)))
    fewer = make_attention(experimental_attention_variant="dsa", dsa_indexer_topk=2).eval()
    fewer.load_state_dict(sparse.state_dict())
    assert not torch.allclose(fewer(x, context_of(2, 6)), dense(x, context_of(2, 6)))


def test_without_a_rotary_part_the_key_is_the_latent_and_positions_do_not_matter() -> None:
    module = make_attention(core=Probe, qk_pos_emb_head_dim=0)
    x = torch.randn(5, 32, dtype=torch.float64)
    module(x, context_of(1, 5))
    given = module.core_attention.given
    assert (given["query"].shape, given["key"].shape) == ((5, 2, 12), (5, 12))
    assert module.core_attention.softmax_scale == 8**-0.5
    last_row = make_attention(qk_pos_emb_head_dim=0)
    shuffled = x[[2, 0, 3, 1, 4]]
    torch.testing.assert_close(last_row(x, context_of(1, 5))[4], last_row(shuffled, context_of(1, 5))[4])


def test_core_attention_gets_the_layers_input_and_the_normed_query_latent() -> None:
    module = make_attention(core=Probe)
    x, context = torch.randn(5, 32, dtype=torch.float64), context_of(1, 5)
    module(x, context)
    given = module.core_attention.given
    assert given["x"] is x and given["context"] is context
    latent = rms(x @ module.linear_q_down_proj.weight.T, module.q_layernorm.weight, 1e-5)
    torch.testing.assert_close(given["qr"], latent)
    assert (given["query"].shape, given["key"].shape, given["up_v_weight"].shape) == ((5, 2, 16), (5, 16), (2, 6, 12))
    assert module.core_attention.softmax_scale == 12**-0.5


def test_the_up_projection_is_called_once_as_a_module() -> None:
    """An adapter in a forward hook acts on both halves and gets a gradient; reading the weight would skip it."""
    module = make_attention()
    x = torch.randn(7, 32, dtype=torch.float64)
    down = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2 * 14, 3, dtype=torch.float64, requires_grad=True)
    inputs: list[Tensor] = []

    def adapt(_module: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
        inputs.append(given[0])
        return output + given[0] @ down.T @ up.T

    handle = module.linear_kv_up_proj.register_forward_hook(adapt)
    adapted = module(x, context_of(1, 7))
    handle.remove()
    assert len(inputs) == 1 and torch.equal(inputs[0], torch.eye(12, dtype=torch.float64))
    assert not torch.allclose(adapted, module(x, context_of(1, 7)))
    gradients = torch.autograd.grad(adapted.square().sum(), (down, up))
    assert all(bool((g.view(2, -1) if g is gradients[1] else g).abs().sum(-1).gt(0).all()) for g in gradients)
    with torch.no_grad():
        module.linear_kv_up_proj.weight += up @ down
    torch.testing.assert_close(adapted, module(x, context_of(1, 7)))


def test_bf16_stays_bf16() -> None:
    module = make_attention(params_dtype=torch.bfloat16)
    output = module(torch.randn(5, 32).bfloat16(), context_of(1, 5))
    assert output.dtype == torch.bfloat16 and bool(output.isfinite().all())
