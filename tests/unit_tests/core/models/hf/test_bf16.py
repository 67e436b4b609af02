"""BF16, layer by layer: every layer is fed the recorded hidden state, since rounding flips selections further on.

Two judges: the golden FP32 values, within what eight bits of mantissa can hold, and transformers' own BF16 layers fed
the same, which round at the same places: the same keys must be selected, and the same error made.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron.core.models.hf import from_pretrained
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, tensors
from tests.unit_tests.core.models.hf.observe import as_batch, golden_sets, max_difference, run


def feed_recorded(layers: nn.ModuleList, name: str, flat: bool) -> None:
    """Replace the input of every layer by the golden hidden state in BF16."""
    for index, layer in enumerate(layers):
        recorded = tensors(name, "outputs")[f"hidden.{index}"].bfloat16()
        recorded = recorded.flatten(0, 1) if flat else recorded
        layer.register_forward_pre_hook(lambda module, args, recorded=recorded: (recorded, *args[1:]))


@cache
def ours(name: str) -> dict[str, Tensor]:
    model = from_pretrained(FIXTURES / name, dtype=torch.bfloat16).eval()
    feed_recorded(model.decoder.layers, name, flat=True)
    return run(model, as_batch(tensors(name, "inputs")["input_ids"]))


@cache
def theirs(name: str) -> dict[str, Tensor]:
    """Attention outputs, layer outputs and selections of transformers' BF16 layers."""
    model = AutoModelForCausalLM.from_pretrained(
        FIXTURES / name, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    feed_recorded(model.model.layers, name, flat=False)
    values: dict[str, Tensor] = {}

    def keep(key: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            values[key] = out[0] if isinstance(out, tuple) else out

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"hidden.{index + 1}"))
        layer.self_attn.register_forward_hook(keep(f"attn_out.{index}"))
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(keep(f"topk.{index}"))
    with torch.no_grad():
        model(tensors(name, "inputs")["input_ids"])
    return golden_sets(values)


def golden(name: str) -> dict[str, Tensor]:
    return golden_sets(tensors(name, "outputs"))


def relative(value: Tensor, expected: Tensor, rows: Tensor) -> float:
    difference = value.float()[rows] - expected.float()[rows]
    return float(difference.norm() / expected.float()[rows].norm())


def rows_alike(values: dict[str, Tensor], expected: dict[str, Tensor], kind: str, index: int) -> Tensor:
    key = f"{kind}.{index}"
    if key not in expected:
        return torch.ones(expected["hidden.1"].shape[:2], dtype=torch.bool)
    return (values[key] == expected[key]).all(-1)


LAYERS = [(name, layer) for name in NAMES for layer in range(6 if name == "b_glm_indexshare" else 4)]


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_layer_is_as_close_to_fp32_as_bf16_can_be(name: str, layer: int) -> None:
    value, expected = ours(name), golden(name)
    assert value[f"hidden.{layer + 1}"].dtype == torch.bfloat16
    same_keys = rows_alike(value, expected, "selected", layer)
    same_experts = rows_alike(value, expected, "router_topk", layer)
    assert (~same_keys).sum() <= 6 and (~same_experts).sum() <= 2
    assert relative(value[f"attn_out.{layer}"], expected[f"attn_out.{layer}"], same_keys) < 0.015
    hidden = f"hidden.{layer + 1}"
    assert relative(value[hidden], expected[hidden], same_keys & same_experts) < 0.02
    scores = f"index_scores.{layer}"
    if scores in expected:
        assert max_difference(scores, value[scores], expected[scores]) < 0.1


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_layer_rounds_where_transformers_does(name: str, layer: int) -> None:
    value, other, expected = ours(name), theirs(name), golden(name)
    if f"selected.{layer}" in other:
        # One row of play: another CPU's matrix product may round a last bit, and a key with it, the other way.
        assert (~rows_alike(value, other, "selected", layer)).sum() <= 1
    attention = f"attn_out.{layer}"
    alike = rows_alike(value, expected, "selected", layer)
    assert relative(value[attention], other[attention], alike) < 0.01
    assert relative(value[attention], expected[attention], alike) < 1.2 * relative(
        other[attention], expected[attention], alike
    )


def test_bf16_is_no_fp32() -> None:
    """The comparison above would be empty if the model quietly computed in FP32."""
    value, expected = ours("a_glm_plain"), golden("a_glm_plain")
    assert relative(value["attn_out.0"], expected["attn_out.0"], rows_alike(value, expected, "selected", 0)) > 1e-3
