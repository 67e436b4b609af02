"""``DSAttention``'s edge: Megatron's shapes and arguments, what it refuses, and how a layer is built.

Faults of others, by kind: masks that are ignored instead of refused, packed rows in another of Megatron's shapes, and
quiet fallbacks. The last cannot occur here: a backend is named, and ``unsupported`` is an error when the layer is
built.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    DSAttentionSubmodules,
    Layout,
    LossTracker,
    reference,
)
from megatron.core.transformer.experimental_attention_variant.dsa.context import to_token_major
from megatron.core.transformer.forward_context import ForwardContext

from .helpers import LATENT, ROPE, Inputs, build_attention, draw, indexer_gradients, layer_inputs, model_config, run


def test_sbhd_equals_token_major() -> None:
    """``[s, b, h, d]`` in, ``[s, b, h * v]`` out, the same numbers in another order; gradients too."""
    batch, length, flat = 3, 7, layer_inputs(21)

    def to_sbhd(t: Tensor) -> Tensor:
        return t.unflatten(0, (batch, length)).transpose(0, 1).contiguous()

    shaped = Inputs(to_sbhd(flat.query), to_sbhd(flat.key).unsqueeze(2), to_sbhd(flat.x), to_sbhd(flat.qr)).leaves()
    up_v, attentions = draw(2, 3, LATENT, seed=9), [build_attention(model_config()) for _ in range(2)]
    flat = flat.leaves()
    expected = run(attentions[0], flat, Layout.causal(batch, length), up_v_weight=up_v)
    actual = attentions[1](shaped.query, shaped.key, x=shaped.x, qr=shaped.qr, up_v_weight=up_v)
    assert actual.shape == (length, batch, 2 * 3)
    assert torch.equal(actual.transpose(0, 1).flatten(0, 1), expected)
    expected.sin().sum().backward()
    actual.sin().sum().backward()
    for a, b in ((shaped.query.grad, flat.query.grad), (shaped.key.grad.squeeze(2), flat.key.grad)):
        torch.testing.assert_close(a.transpose(0, 1).flatten(0, 1), b, rtol=1e-12, atol=1e-14)
    for a, b in zip(*(indexer_gradients(attention).values() for attention in attentions), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


THD_SHAPES = {
    "t h d": (lambda q: q, lambda t: t, lambda t: t),
    "t h d and t 1 d": (lambda q: q, lambda t: t[:, None], lambda t: t[:, None]),
    "t 1 h d": (lambda q: q[:, None], lambda t: t[:, None, None], lambda t: t[:, None]),
}


@pytest.mark.parametrize("name", THD_SHAPES)
def test_packed_rows_in_every_shape_of_megatron(name: str) -> None:
    query_shape, key_shape, row_shape = THD_SHAPES[name]
    inputs, attention = layer_inputs(29), build_attention(model_config())
    expected = run(attention, inputs)
    packed = PackedSeqParams.from_offsets((0, 9, 10, 10, 21), (0, 11, 12, 15, 29))
    actual = attention(
        query_shape(inputs.query),
        key_shape(inputs.key),
        x=row_shape(inputs.x),
        qr=row_shape(inputs.qr),
        packed_seq_params=packed,
    )
    assert actual.shape == ((29, 1, 2 * LATENT) if name == "t 1 h d" else (29, 2 * LATENT))
    assert torch.equal(actual.reshape(29, -1), expected)


def test_the_value_projection_leaves_the_latent() -> None:
    inputs, attention, up_v = layer_inputs(29), build_attention(model_config()), draw(2, 3, LATENT, seed=9)
    latent = run(attention, inputs).unflatten(-1, (2, LATENT))
    projected = torch.stack([latent[:, h] @ up_v[h].T for h in range(2)], dim=1)
    torch.testing.assert_close(run(attention, inputs, up_v_weight=up_v), projected.flatten(1))


def test_the_default_scale_is_that_of_whole_heads() -> None:
    config = model_config()
    assert build_attention(config).softmax_scale == (4 + 4) ** -0.5
    given = DSAttention(config, DSAttentionSubmodules(indexer=lambda **_: torch.nn.Linear(1, 1)), 1, softmax_scale=0.5)
    assert given.softmax_scale == 0.5


REFUSED_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a value": ({"value": torch.zeros(29, 2, 3)}, "pass None for the three"),
    "a mask": ({"attention_mask": torch.ones(29, 29)}, "packed_seq_params"),
    "a bias": ({"attention_bias": torch.zeros(1)}, "got a value, an attention_mask or an attention_bias"),
    "no x": ({"x": None}, "no x or no qr"),
    "no qr": ({"qr": None}, "pass the layer's input and the normed query latent"),
    "no causality": ({"attn_mask_type": SimpleNamespace(name="no_mask")}, "attn_mask_type=no_mask"),
    "an arbitrary mask": ({"attn_mask_type": "arbitrary"}, "use causal or padding_causal"),
    "short offsets": (
        {"packed_seq_params": PackedSeqParams.from_offsets((0, 9, 20))},
        r"one row of 20 tokens, but the input is \[1, 29\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_what_a_layout_cannot_say_is_refused(name: str) -> None:
    changed, message = REFUSED_CALLS[name]
    inputs, attention = layer_inputs(29), build_attention(model_config())
    with pytest.raises(ValueError, match=message) as caught:
        attention(inputs.query, inputs.key, **({"x": inputs.x, "qr": inputs.qr} | changed))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_packed_batch_of_several_rows_is_refused() -> None:
    inputs, attention = layer_inputs(28), build_attention(model_config())
    packed = PackedSeqParams.from_offsets((0, 14))
    shaped = [t.unflatten(0, (2, 14)).transpose(0, 1) for t in inputs]
    with pytest.raises(ValueError, match=r"the input is \[2, 14\]: flatten the batch into one packed row"):
        attention(shaped[0], shaped[1], x=shaped[2], qr=shaped[3], packed_seq_params=packed)


@pytest.mark.parametrize("mask_type", [None, "causal", SimpleNamespace(name="padding_causal")], ids=str)
def test_causal_mask_types_are_accepted(mask_type: Any) -> None:
    inputs, attention = layer_inputs(29), build_attention(model_config())
    assert torch.equal(run(attention, inputs, attn_mask_type=mask_type), run(attention, inputs))


def test_construction_refuses_what_would_be_ignored() -> None:
    config, submodules = model_config(), DSAttentionSubmodules(indexer=lambda **_: torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        DSAttention(config, submodules, 1, attention_dropout=0.1)
    with pytest.raises(ValueError, match="attn_mask_type=no_mask"):
        DSAttention(config, submodules, 1, attn_mask_type=SimpleNamespace(name="no_mask"))
    DSAttention(config, submodules, 1, SimpleNamespace(name="causal"), "self", 0.0)


def test_a_backend_that_cannot_run_fails_when_the_layer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "dsa_indexer_topk=5 is odd: use a multiple of 64."
    monkeypatch.setattr(reference.ReferenceBackend, "unsupported", staticmethod(lambda config, device: reason))
    with pytest.raises(ValueError, match=reason):
        build_attention(model_config())


def test_layers_that_reuse_own_no_indexer() -> None:
    config = model_config(topk_freq=3)
    layers = {number: build_attention(config, number) for number in (1, 2, 3, 4)}
    assert [layers[n].indexer is None for n in (1, 2, 3, 4)] == [False, True, True, False]
    assert not list(layers[2].parameters())
    with pytest.raises(ValueError, match="Layer 2 reuses the keys of layer 1, which did not run in this pass"):
        run(layers[2], layer_inputs(29))


def test_a_layer_copies_after_use() -> None:
    attention, inputs = build_attention(model_config()), layer_inputs(29)
    expected = run(attention, inputs.leaves())
    expected.sum().backward()
    assert torch.equal(run(copy.deepcopy(attention), inputs), expected)


def test_the_context_is_made_where_none_is_given() -> None:
    context = ForwardContext.build(2, 5, None, "cpu")
    assert context.layout == Layout.causal(2, 5) and context.positions_T.tolist() == [*range(5), *range(5)]
    assert context.topk_cache.get(1) is None and context.loss_scale() == 1 / 10
    packed = ForwardContext.build(1, 16, PackedSeqParams.from_offsets((0, 5, 12), (0, 8, 16)), "cpu")
    assert packed.layout == Layout.packed((0, 5, 12), (0, 8, 16))
    assert packed.loss_scale() == 1 / 12, "valid rows"
    assert ForwardContext.build(1, 4, PackedSeqParams.from_offsets((0, 0), (0, 4)), "cpu").loss_scale() == 1
    assert ForwardContext.build(2, 5, None, "cpu", LossTracker(normalizer=3.0)).loss_scale() == 1 / 3
    reused = LossTracker()
    scales = [ForwardContext.build(2, length, None, "cpu", reused).loss_scale() for length in (5, 20)]
    assert scales == [1 / 10, 1 / 40], "a tracker takes no pass's rows over to the next"


class Ranks(NamedTuple):
    """A process group, as far as a context looks at one."""

    number: int

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.number


def test_ranks_of_one_microbatch_divide_by_the_same_rows() -> None:
    """So their gradients add up to those of one process, however unequal their own valid rows are."""
    packed = PackedSeqParams.from_offsets((0, 3), (0, 8))
    contexts = [ForwardContext.build(1, 4, packed, "cpu", cp_group=Ranks(number)) for number in (0, 1)]
    assert [context.layout.num_valid_rows for context in contexts] == [2, 1]
    assert [context.loss_scale() for context in contexts] == [1 / 3, 1 / 3]


@dataclass
class ForeignPacking:
    """Megatron-LM's parameters: offsets on the device alone."""

    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None = None


def test_the_offsets_of_megatrons_own_packing_are_read() -> None:
    real, padded = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)
    context = ForwardContext.build(1, 16, ForeignPacking(real, padded), "cpu")
    assert context.layout == Layout.packed((0, 5, 12), (0, 8, 16))
    assert ForwardContext.build(1, 12, ForeignPacking(real), "cpu").layout == Layout.packed((0, 5, 12))


def test_several_sequences_under_sequence_parallelism_are_refused() -> None:
    """Half of the rows of two sequences are no half of batch-major rows."""
    x = layer_inputs(8)
    query, (key, hidden, qr) = x.query.unflatten(0, (4, 2)), [t[:4].unflatten(0, (2, 2)) for t in (x.key, x.x, x.qr)]
    message = "^DSAttention got 2 sequences under sequence parallelism.* use a micro-batch of 1, or one packed row.$"
    with pytest.raises(ValueError, match=message):
        to_token_major(query, key.unsqueeze(2), hidden, qr, LATENT + ROPE, shards=2)
    rows = to_token_major(x.query, x.key[:4], x.x[:4], x.qr[:4], LATENT + ROPE, shards=2)
    assert len(rows.q_THD) == 8 and len(rows.kv_SD) == 4


OTHER_ROWS = {
    "cached keys": (lambda t: t._replace(query=t.query[-1:], x=t.x[-1:], qr=t.qr[-1:]), r"key \[6, 10\]"),
    "two keys a token": (lambda t: t._replace(key=torch.cat([t.key, t.key])), r"key \[12, 10\]"),
    "few hidden states": (lambda t: t._replace(x=t.x[:5]), r"x \[5, 24\]"),
    "many query latents": (lambda t: t._replace(qr=torch.cat([t.qr, t.qr])), r"qr \[12, 10\]"),
    "batch first": (
        lambda t: Inputs(
            *(x.unflatten(0, (3, 2)) for x in (t.query, t.key.unsqueeze(1), t.x)), t.qr.unflatten(0, (2, 3))
        ),
        r"qr \[2, 3, 10\], but every token brings its own row of each \(here \[3, 2\]\)",
    ),
    "narrow heads": (lambda t: t._replace(query=t.query[..., :8], key=t.key[:, :8]), "keys of 8 channels, .* = 10"),
    "narrow keys": (lambda t: t._replace(key=t.key[:, :8]), "query heads of 10 and keys of 8 channels"),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_operands_of_other_tokens_are_refused(name: str) -> None:
    """All of them would run, and give numbers."""
    change, message = OTHER_ROWS[name]
    inputs = change(layer_inputs(6))
    with pytest.raises(ValueError, match=message) as caught:
        build_attention(model_config())(inputs.query, inputs.key, x=inputs.x, qr=inputs.qr)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_autocast_is_refused() -> None:
    attention, inputs = build_attention(model_config()), layer_inputs(6)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast.*bfloat16.* bf16=True.$"):
        run(attention, inputs, Layout.causal(1, 6))
    with torch.autocast("cpu", enabled=False):
        run(attention, inputs, Layout.causal(1, 6))
