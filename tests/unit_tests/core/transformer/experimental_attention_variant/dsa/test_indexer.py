"""The indexer's operands against NumPy in FP64, and the faults that people met there.

By kind: the wrong rotary pairing, rotating the wrong end of the head, an RMSNorm in place of the key LayerNorm, one
epsilon for all norms, a query latent taken before its RMSNorm, head weights rounded after their projection. What
``rope_fp32``, the tables' precision and the Hadamard rotation do to the last bit is tested beside this file, in
``test_rope_precision``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    Layout,
    record_topk,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs
from megatron.core.transformer.experimental_attention_variant.dsa.indexer import IndexerKeyNorm
from megatron.core.transformer.experimental_attention_variant.dsa.layout import positions
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from . import oracle
from .helpers import INDEX_DIM, INDEXER_SPEC, ROPE, context_for, draw, model_config, randomize

# Positions restart in every document, and padding rows stand at 0.
LAYOUT = Layout.packed((0, 9, 10, 10, 21), (0, 11, 12, 15, 29))


def build_indexer(config: MLATransformerConfig, seed: int = 0) -> DSAIndexer:
    indexer = build_module(INDEXER_SPEC, config=config)
    assert isinstance(indexer, DSAIndexer)
    randomize(indexer, seed)
    return indexer


def numpy_operands(indexer: DSAIndexer, config: MLATransformerConfig, x: Tensor, qr: Tensor, at: Tensor) -> Any:
    weights = {name: p.detach().double().numpy() for name, p in indexer.named_parameters()}
    return oracle.indexer(weights, config, x.double().numpy(), qr.double().numpy(), at.numpy())


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("rotated", [True, False], ids=["hadamard", "plain"])
def test_operands_equal_the_formula(interleaved: bool, rotated: bool) -> None:
    config = model_config(rope_interleaved=interleaved, rotate_activation=rotated)
    indexer, at = build_indexer(config), positions(LAYOUT, "cpu")
    x, qr = draw(29, 24, seed=1), draw(29, 10, seed=2)
    made = indexer(x, qr, at)
    q, k, w = numpy_operands(indexer, config, x, qr, at)
    assert made.q_TID.shape == (29, 3, INDEX_DIM) and made.k_SD.shape == (29, INDEX_DIM) and made.w_TI.shape == (29, 3)
    for actual, expected in ((made.q_TID, q), (made.k_SD, k), (made.w_TI, w)):  # tables are FP32
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=1e-5)
    # The other pairing is another q and another k, each by itself.
    config.dsa_indexer_rope_interleaved = not interleaved
    q, k, _ = numpy_operands(indexer, config, x, qr, at)
    for actual, wrong in ((made.q_TID, q), (made.k_SD, k)):
        assert np.abs(actual.detach().numpy() - wrong).max() > 0.1


class GroupOf(NamedTuple):
    """A process group, as far as a module looks at one that it does not use."""

    ranks: int

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("name", ["tensor", "context"])
@pytest.mark.parametrize(("configured", "ranks"), [(1, 2), (2, None), (2, 4)])
def test_groups_of_another_size_than_the_configured_one_are_refused(
    name: str, configured: int, ranks: int | None
) -> None:
    option, group = (f"{name}_model_parallel_size", "tp") if name == "tensor" else (f"{name}_parallel_size", "cp")
    config = model_config(**{option: configured, "cp_comm_type": "allgather"})
    groups = SimpleNamespace(**{group: None if ranks is None else GroupOf(ranks)})
    message = f"^{option} is {configured}, but .* process group of {ranks or 1}: .* or set {option}={ranks or 1}.$"
    with pytest.raises(ValueError, match=message):
        build_module(INDEXER_SPEC, config=config, pg_collection=groups)
    build_module(INDEXER_SPEC, config=config, pg_collection=SimpleNamespace(**{group: GroupOf(configured)}))


def test_the_front_of_a_head_is_rotated_and_the_rest_is_not() -> None:
    indexer = build_indexer(model_config(rotate_activation=False))
    x, qr = draw(4, 24, seed=1), draw(4, 10, seed=2)
    here, there = indexer(x, qr, torch.arange(4)), indexer(x, qr, torch.arange(4) + 17)
    for a, b in ((here.q_TID, there.q_TID), (here.k_SD, there.k_SD)):
        assert torch.equal(a[..., ROPE:], b[..., ROPE:]) and not torch.isclose(a[..., :ROPE], b[..., :ROPE]).any()
    assert torch.equal(here.w_TI, there.w_TI)


def operands(made: IndexerInputs) -> tuple[Tensor, Tensor, Tensor]:
    return made.q_TID, made.k_SD, made.w_TI


def test_without_a_rotary_part_no_position_matters() -> None:
    config = model_config(qk_pos_emb_head_dim=0)
    indexer, x, qr = build_indexer(config), draw(4, 24, seed=1), draw(4, 10, seed=2)
    made, moved = indexer(x, qr, torch.arange(4)), indexer(x, qr, torch.arange(4) + 17)
    assert all(torch.equal(a, b) for a, b in zip(operands(made), operands(moved), strict=True))
    for actual, expected in zip(operands(made), numpy_operands(indexer, config, x, qr, torch.arange(4)), strict=True):
        np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=1e-5)


def test_scores_depend_on_relative_positions_alone() -> None:
    indexer = build_indexer(model_config())
    x, qr = draw(6, 24, seed=1), draw(6, 10, seed=2)
    products = [
        torch.einsum("tid,sd->tis", m.q_TID, m.k_SD) for m in (indexer(x, qr, torch.arange(6) + n) for n in (0, 9))
    ]
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-5)


def test_every_weight_gets_a_gradient_and_the_bias_too() -> None:
    indexer = build_indexer(model_config())
    made = indexer(draw(6, 24, seed=1), draw(6, 10, seed=2), torch.arange(6))
    (made.q_TID.sin().sum() + made.k_SD.sin().sum() + made.w_TI.sin().sum()).backward()
    names = {name for name, p in indexer.named_parameters() if p.grad is not None and p.grad.abs().min() > 0}
    assert names == {
        "linear_wq_b.weight",
        "linear_wk.weight",
        "k_norm.weight",
        "k_norm.bias",
        "linear_weights_proj.weight",
    }


def test_the_key_norm_removes_the_mean() -> None:
    """Keys around 50: a LayerNorm's output averages to its bias, an RMSNorm's would not."""
    norm = IndexerKeyNorm(model_config(), 128, 1e-6)
    with torch.no_grad():
        norm.bias.copy_(draw(128, seed=1))
    normed = norm(draw(5, 128, seed=2) + 50.0)
    torch.testing.assert_close(normed.mean(-1), norm.bias.mean().expand(5))
    spread = (normed - norm.bias).square().mean(-1)
    torch.testing.assert_close(spread, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-5)
    assert {name for name, _ in norm.named_parameters()} == {"weight", "bias"} == set(norm.state_dict())


def test_fp32_norm_parameters_keep_their_bits_in_a_bf16_model() -> None:
    weight, keys = 1 + 2**-9, draw(5, 128, seed=2).bfloat16()
    norms = {}
    for fp32 in (True, False):
        config = model_config(bf16=True, params_dtype=torch.bfloat16, k_norm_fp32=fp32, rope_fp32=True)
        norms[fp32] = IndexerKeyNorm(config, 128, 1e-6)
        nn.init.constant_(norms[fp32].weight, weight)
    assert norms[True].weight.dtype == torch.float32 and norms[True].weight[0] == weight
    assert norms[False].weight.dtype == torch.bfloat16 and norms[False].weight[0] == 1
    # With rope_fp32 nothing is rounded on the way out, so the difference shows.
    a, b = norms[True](keys), norms[False](keys)
    assert a.dtype == torch.float32
    torch.testing.assert_close(a, b * weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms[True](keys).bfloat16(), (b * weight).bfloat16(), rtol=0, atol=0)


def test_the_key_norm_has_an_epsilon_of_its_own() -> None:
    """Keys of deviation 1e-3: 1e-6 and 1e-5 are told apart by more than 10%."""
    for given, used in ((1e-6, 1e-6), (None, 1e-5)):
        config = model_config(k_norm_epsilon=given, layernorm_epsilon=1e-5, rotate_activation=False)
        indexer = build_indexer(config)
        with torch.no_grad():
            indexer.linear_wk.weight.mul_(1e-3)
            indexer.k_norm.bias.zero_()
        x, qr, at = draw(5, 24, seed=1), draw(5, 10, seed=2), torch.zeros(5, dtype=torch.int64)
        actual = indexer(x, qr, at).k_SD.detach().numpy()
        for eps in (1e-6, 1e-5):
            config.dsa_indexer_k_norm_epsilon = eps
            _, expected, _ = numpy_operands(indexer, config, x, qr, at)
            error = np.abs(actual - expected).max() / np.abs(expected).max()
            assert error < 1e-6 if eps == used else error > 0.1


def test_head_weights_are_not_rounded_after_their_projection() -> None:
    config = model_config(bf16=True, params_dtype=torch.bfloat16)
    indexer = build_indexer(config)
    x, qr = draw(40, 24, seed=1, dtype=torch.bfloat16), draw(40, 10, seed=2, dtype=torch.bfloat16)
    with torch.no_grad():
        w_TI = indexer(x, qr, torch.arange(40)).w_TI
        gate_TI = indexer.linear_weights_proj(x)
    assert w_TI.dtype == torch.float32 and gate_TI.dtype == torch.bfloat16
    exact_TI = gate_TI.double() * (3 * INDEX_DIM) ** -0.5
    largest_T1 = exact_TI.abs().amax(-1, keepdim=True)
    assert ((w_TI.double() - exact_TI).abs() / largest_T1).max() < 1e-6
    rounded = (gate_TI * (3 * INDEX_DIM) ** -0.5).double()
    assert ((rounded - exact_TI).abs() / largest_T1).max() > 1e-3


def mla_layer(weight: Tensor) -> MLASelfAttention:
    config = model_config(params_dtype=torch.float32, topk=4, attention_latent_norm_epsilon=1e-6)
    spec = get_gpt_decoder_block_spec(config).layer_specs[0].submodules.self_attention
    layer = build_module(spec, config=config, layer_number=1)
    assert isinstance(layer, MLASelfAttention)
    randomize(layer, 0)
    with torch.no_grad():
        layer.q_layernorm.weight.copy_(weight)
    return layer


@pytest.mark.parametrize("per_channel", [True, False], ids=["weights 0.2 to 5", "weights of one"])
def test_the_query_latent_is_read_after_its_norm(per_channel: bool) -> None:
    """In a whole MLA layer. A per-token scale moves no rank, so with weights of one the mistake would be invisible."""
    weight = torch.rand(10, generator=torch.Generator().manual_seed(1)) * 4.8 + 0.2 if per_channel else torch.ones(10)
    layer, x = mla_layer(weight), draw(64, 24, seed=1, dtype=torch.float32)
    layout = Layout.causal(1, 64)
    with torch.no_grad(), record_topk(layer) as record:
        layer(x, context_for(layout))
        raw = layer.linear_q_down_proj(x)
        normed = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + 1e-6) * weight
        attention, same = layer.core_attention, []
        for latent in (normed, raw):
            made = attention.indexer(x, latent, positions(layout, "cpu"))
            expected = attention.backend.select(made, layout, 4).indices_TK
            same.append(float((record[1].indices_TK == expected).all(-1).float().mean()))
    assert same[0] == 1.0
    assert same[1] < 0.7 if per_channel else same[1] > 0.95
