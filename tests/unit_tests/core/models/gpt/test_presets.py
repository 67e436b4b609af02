"""Presets build models of the published sizes (on the meta device), and the tiny one learns."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.models.gpt import PRESETS, GPTModel, build_gpt_model, get_preset
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker


def parameters_in(model: GPTModel, part: str = "") -> int:
    return sum(p.numel() for name, p in model.named_parameters() if part in name)


@pytest.mark.parametrize(
    ("name", "total", "active", "selecting", "layers"),
    [
        ("glm-5", 744e9, 40e9, 78, 78),
        ("glm-5.2", 744e9, 40e9, 21, 78),
        ("deepseek-v3.2", 671e9, 37e9, 61, 61),
    ],
)
def test_published_sizes(name: str, total: float, active: float, selecting: int, layers: int) -> None:
    config = get_preset(name)
    model = build_gpt_model(config, device="meta")
    parameters = parameters_in(model)
    assert parameters == pytest.approx(total, rel=2e-3)
    assert config.num_moe_experts is not None
    resting = parameters_in(model, ".experts.") * (1 - config.moe_router_topk / config.num_moe_experts)
    # Published counts of active parameters differ in whether embedding and head are in: within a twentieth.
    assert parameters - resting == pytest.approx(active, rel=0.05)
    owners = [layer.self_attention.core_attention.indexer is not None for layer in model.decoder.layers]
    assert (len(owners), sum(owners)) == (layers, selecting)
    assert all(p.is_meta for p in model.parameters())


def test_index_share_of_glm_5_2() -> None:
    dsa = get_preset("glm-5.2").dsa_config()
    selecting = [number for number in range(1, 79) if dsa.computes_topk(number)]
    assert selecting == [1, 2, *range(3, 76, 4)]
    assert {number: dsa.source_layer(number) for number in (4, 6, 7, 78)} == {4: 3, 6: 3, 7: 7, 78: 75}


@pytest.mark.parametrize(
    ("name", "longest", "base"), [("glm-5", 202752, 1e6), ("glm-5.2", 1048576, 8e6), ("deepseek-v3.2", 163840, 1e4)]
)
def test_published_context_lengths(name: str, longest: int, base: float) -> None:
    """Of the released config.json files; a longer context came with a larger rotary base."""
    config = get_preset(name)
    assert (config.max_position_embeddings, config.rotary_base) == (longest, base)


def test_presets_are_fresh_and_unknown_names_are_one_sentence() -> None:
    first = get_preset("tiny-glm5")
    first.num_layers = 1
    assert get_preset("tiny-glm5").num_layers == 4 and set(PRESETS) >= {"glm-5", "tiny-glm5"}
    with pytest.raises(ValueError, match="no preset 'glm-6': choose one of tiny-glm5, glm-5"):
        get_preset("glm-6")


def test_the_tiny_preset_has_glms_structure_and_learns_a_batch() -> None:
    config = get_preset("tiny-glm5")
    torch.manual_seed(0)
    model = build_gpt_model(config).train()
    owners = [layer.self_attention.core_attention.indexer is not None for layer in model.decoder.layers]
    assert owners == [True, False, True, False]
    assert [hasattr(layer.mlp, "router") for layer in model.decoder.layers] == [False, True, True, True]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 257, (2, 65))
    history = []
    for _ in range(25):
        losses = LossTracker()
        loss = model(tokens[:, :-1], labels=tokens[:, 1:], losses=losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
        assert sorted(losses.kl_sums) == [1, 3]
    assert history[0] == pytest.approx(math.log(257), abs=0.2)
    assert history[-1] < history[0] - 1
