"""A parity check that cannot fail proves nothing: mistakes are put in, one at a time, and the check has to notice.

``parity`` compares a whole layer with NumPy: scoring operands, selected keys, outputs, the logged loss and gradients.
It passes on the code as it is; each mutation below replaces one function at run time and must break it. Rows see up to
24 keys and keep 5, since nothing shows while nothing is dropped; the tie, epsilon and latent mistakes have data on
which they can show, and one test states where a mistake is *invisible* (no dropped keys), so that nobody trusts such
data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAttention,
    Layout,
    LossTracker,
    attention,
    indexer,
    reference,
)
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import IndexerInputs, TopK
from megatron.core.transformer.experimental_attention_variant.dsa.layout import positions

from . import oracle
from .helpers import LATENT, ROPE, Inputs, build_attention, context_for, draw, layer_inputs, model_config

LAYOUT = Layout.packed((0, 24, 31))
Patch = Callable[[pytest.MonkeyPatch], None]


def build(sparse: bool, topk: int) -> tuple[Any, DSAttention, Inputs]:
    """A layer whose mistakes show: small keys (the norm's epsilon counts), two heads of opposite taste, and ties."""
    config = model_config(use_sparse_loss=sparse, topk=topk, rope_interleaved=True, rotate_activation=False)
    layer = build_attention(config)
    inputs = layer_inputs(31)
    inputs.query[:, 1] = -2 * inputs.query[:, 0]
    # Only head 0 counts, and only where its product is positive: about half of all keys tie at exactly 0.
    with torch.no_grad():
        layer.indexer.linear_weights_proj.weight[1:] = 0.0
        layer.indexer.linear_wk.weight.mul_(1e-3)
    return config, layer, inputs


def parity(sparse: bool = True, topk: int = 5) -> None:
    """Raise unless the layer equals NumPy."""
    config, layer, given = build(sparse, topk)
    raw, weight = draw(31, 10, seed=70), draw(10, seed=71).abs() + 0.2
    normed = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + 1e-6) * weight
    inputs = given._replace(qr=LATENT_SEEN(raw, normed)).leaves()
    made: list[IndexerInputs] = []
    layer.indexer.register_forward_hook(lambda _, __, operands: made.append(operands))
    losses = LossTracker()
    context = context_for(LAYOUT, losses)
    output = layer(inputs.query, inputs.key, x=inputs.x, qr=inputs.qr, context=context)
    output.square().sum().backward()

    weights = {name: p.detach().numpy() for name, p in layer.indexer.named_parameters()}
    at = positions(LAYOUT, "cpu").numpy()
    q, k, w = oracle.indexer(weights, config, given.x.numpy(), normed.numpy(), at)
    close(made[0].q_TID, q, 1e-5)
    close(made[0].k_SD, k, 1e-5)
    close(made[0].w_TI, w, 1e-9)
    q, k, w = (
        t.detach().numpy() for t in (made[0].q_TID, made[0].k_SD, made[0].w_TI)
    )  # from here on, bit-equal inputs
    query, kv, scale = given.query.numpy(), given.key.numpy(), layer.softmax_scale
    chosen, keys, outputs, targets = [], [], [], []
    for t, visible in enumerate(oracle.visible_keys_of(LAYOUT)):
        chosen.append(oracle.best(oracle.index_scores(q[t], k, w[t]), visible, topk))
        keys.append(chosen[t] if sparse else list(visible))
        outputs.append(oracle.attend(query[t], kv, chosen[t], scale, LATENT)[0])
        targets.append(oracle.probabilities(query[t], kv, keys[t], scale).sum(0))
    found = [[i for i in row if i >= 0] for row in context.topk_cache.require(1, 1).indices_TK.tolist()]
    assert found == chosen
    close(output, np.stack(outputs).reshape(31, -1), 1e-9)
    kl_sum, dq, dk, dw = oracle.kl_and_gradients(q, k, w, keys, targets)
    close(losses.kl_sums[1], kl_sum, 1e-9)
    assert inputs.x.grad is None and inputs.qr.grad is None
    close_weights(layer, given, normed, (dq, dk, dw))
    close_attention_gradients(inputs, chosen, np.stack(outputs), scale)


def close(actual: Tensor | None, expected: Any, tolerance: float) -> None:
    assert actual is not None
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=tolerance)


def close_weights(layer: DSAttention, given: Inputs, normed: Tensor, gradients: tuple[Any, ...]) -> None:
    """Projections without RoPE or norm in between: dW = d(output)^T input, coefficient 0.7 over 31 rows."""
    factor = 0.7 / 31
    close(layer.indexer.linear_weights_proj.weight.grad, gradients[2].T @ given.x.numpy() * factor * 24**-0.5, 1e-8)
    dq = gradients[0].copy()  # the rotation back: by the angle's negative
    dq[..., :ROPE] = oracle.rotate(dq[..., :ROPE], -positions(LAYOUT, "cpu").numpy(), 100.0, True)
    close(layer.indexer.linear_wq_b.weight.grad, dq.reshape(31, -1).T @ normed.numpy() * factor, 1e-6)
    # The bias is added to every key: unrotated channels sum up.
    close(layer.indexer.k_norm.bias.grad[ROPE:], gradients[1].sum(0)[ROPE:] * factor, 1e-7)


def close_attention_gradients(inputs: Inputs, chosen: list[list[int]], outputs: Any, scale: float) -> None:
    """d(sum of squares) in the queries: with P the probabilities, dlogits = P * (dP - sum(P * dP))."""
    query, kv = inputs.query.detach().numpy(), inputs.key.detach().numpy()
    for t, ids in enumerate(chosen):
        p_HK = oracle.probabilities(query[t], kv, ids, scale)
        dp_HK = 2 * outputs[t] @ kv[ids, :LATENT].T
        dlogits_HK = p_HK * (dp_HK - (p_HK * dp_HK).sum(-1, keepdims=True))
        close(inputs.query.grad[t], dlogits_HK @ kv[ids] * scale, 1e-8)


def LATENT_SEEN(raw: Tensor, normed: Tensor) -> Tensor:  # noqa: N802
    """Which query latent the layer is given; one mutation swaps it."""
    return normed


# ---- the mistakes ----


def no_relu(patch: pytest.MonkeyPatch) -> None:
    score = reference.score
    patch.setattr(reference, "score", lambda operands, relu=True: score(operands, False))


def other_pairing(patch: pytest.MonkeyPatch) -> None:
    rotate = indexer.apply_rotary_pos_emb
    patch.setattr(indexer, "apply_rotary_pos_emb", lambda x, cos, sin, pairs: rotate(x, cos, sin, not pairs))


def rotation_at_the_back(patch: pytest.MonkeyPatch) -> None:
    rotate = indexer.DSAIndexer._rotate

    def flipped(self: Any, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(t.flip(-1) for t in rotate(self, q.flip(-1), k.flip(-1), *rest))

    patch.setattr(indexer.DSAIndexer, "_rotate", flipped)


def padded_positions(patch: pytest.MonkeyPatch) -> None:
    forward = indexer.DSAIndexer.forward
    patch.setattr(indexer.DSAIndexer, "forward", lambda self, x, qr, at: forward(self, x, qr, torch.arange(len(at))))


def other_epsilon(patch: pytest.MonkeyPatch) -> None:
    forward = indexer.IndexerKeyNorm.forward

    def wrong(self: Any, k: Tensor) -> Tensor:
        self.eps = 1e-5
        return forward(self, k)

    patch.setattr(indexer.IndexerKeyNorm, "forward", wrong)


def rms_norm(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, k: Tensor) -> Tensor:
        return k * torch.rsqrt(k.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias

    patch.setattr(indexer.IndexerKeyNorm, "forward", wrong)


def raw_query_latent(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "LATENT_SEEN", lambda raw, normed: raw)


def unscaled_weights(patch: pytest.MonkeyPatch) -> None:
    scale_operands(patch, lambda made: made.w_TI * 24**0.5)


def rounded_weights(patch: pytest.MonkeyPatch) -> None:
    scale_operands(patch, lambda made: made.w_TI.bfloat16().double())


def scale_operands(patch: pytest.MonkeyPatch, weights: Callable[[IndexerInputs], Tensor]) -> None:
    forward = indexer.DSAIndexer.forward

    def wrong(self: Any, *args: Any) -> IndexerInputs:
        made = forward(self, *args)
        return IndexerInputs(made.q_TID, made.k_SD, weights(made))

    patch.setattr(indexer.DSAIndexer, "forward", wrong)


def ties_to_the_highest_id(patch: pytest.MonkeyPatch) -> None:
    select = reference.select

    def wrong(scores: Tensor, visible: Tensor, k: int) -> TopK:
        topk = select(scores.flip(-1), visible.flip(-1), k)
        ids = torch.where(topk.indices_TK < 0, -1, scores.shape[1] - 1 - topk.indices_TK)
        order = torch.where(ids < 0, scores.shape[1], ids).sort(-1).indices
        return TopK(ids.gather(1, order), topk.length_T, topk.scores_TK.gather(1, order))

    patch.setattr(reference, "select", wrong)


def mask_after_top_k(patch: pytest.MonkeyPatch) -> None:
    select = reference.select

    def wrong(scores: Tensor, visible: Tensor, k: int) -> TopK:
        topk = select(scores, torch.ones_like(visible), k)
        seen = visible.gather(1, topk.indices_TK.clamp(min=0).long()) & (topk.indices_TK >= 0)
        return TopK(topk.indices_TK.masked_fill(~seen, -1), seen.sum(-1).int(), topk.scores_TK)

    patch.setattr(reference, "select", wrong)


def one_key_too_few(patch: pytest.MonkeyPatch) -> None:
    select = reference.select

    def wrong(scores: Tensor, visible: Tensor, k: int) -> TopK:
        topk = select(scores, visible, k - 1)
        pad = torch.nn.functional.pad
        return TopK(pad(topk.indices_TK, (0, 1), value=-1), topk.length_T, pad(topk.scores_TK, (0, 1)))

    patch.setattr(reference, "select", wrong)


def a_row_sees_not_itself(patch: pytest.MonkeyPatch) -> None:
    visible = reference._visible

    def wrong(*args: Any) -> Tensor:
        seen = visible(*args)
        last = seen.cumsum(-1) == seen.sum(-1, keepdim=True)
        return seen & ~(last & (seen.sum(-1, keepdim=True) > 1))

    patch.setattr(reference, "_visible", wrong)


def target_not_normalized(patch: pytest.MonkeyPatch) -> None:
    def wrong(target: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        p = target.masked_fill(~mask, 0.0)
        log_prediction = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
        return (torch.xlogy(p, p) - p * log_prediction).sum()

    patch.setattr(reference, "kl_divergence", wrong)


def reversed_kl(patch: pytest.MonkeyPatch) -> None:
    def wrong(target: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        p = target.masked_fill(~mask, 0.0)
        s = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (torch.xlogy(s, s) - torch.xlogy(s, p / p.sum(-1, keepdim=True))).sum()

    patch.setattr(reference, "kl_divergence", wrong)


def target_of_one_head(patch: pytest.MonkeyPatch) -> None:
    for name in ("_sparse_target", "_dense_target"):
        target = getattr(reference.ReferenceBackend, name)

        def wrong(inputs: Any, *args: Any, target: Any = target) -> Tensor:
            one = type(inputs)(inputs.q_THD[:, :1], inputs.kv_SD, inputs.scale)
            if hasattr(args[0], "lse_TH"):
                args = (args[0]._replace(lse_TH=args[0].lse_TH[:, :1]), *args[1:])
            return target(one, *args)

        patch.setattr(reference.ReferenceBackend, name, staticmethod(wrong))


def gradient_into_the_hidden_state(patch: pytest.MonkeyPatch) -> None:
    """As if x and qr were not detached before the indexer."""
    forward = DSAttention.forward

    def wrong(self: DSAttention, query: Tensor, key: Tensor, *, x: Tensor, qr: Tensor, context: Any) -> Tensor:
        index = self.indexer.forward
        self.indexer.forward = lambda _, __, *rest: index(x, qr, *rest)
        return forward(self, query, key, x=x, qr=qr, context=context)

    patch.setattr(DSAttention, "forward", wrong)


def gradient_through_the_attended(patch: pytest.MonkeyPatch) -> None:
    """As if the loss reached the attention's operands: every query gets a little of it."""
    attach = attention.attach_loss
    patch.setattr(attention, "attach_loss", lambda output, loss: attach(output, loss) * (1 + 1e-3 * loss))


def loss_not_attached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "attach_loss", lambda output, loss: output)


def loss_without_normalizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossTracker, "scale", lambda self, rows: 1.0)


def value_of_the_rotary_part(patch: pytest.MonkeyPatch) -> None:
    attend = reference.attend

    def wrong(inputs: Any, chosen: Tensor, value_dim: int) -> Any:
        attended = attend(inputs, chosen, inputs.kv_SD.shape[1])
        return attended._replace(out_THV=attended.out_THV[..., -value_dim:])

    patch.setattr(reference, "attend", wrong)


MUTATIONS: list[Patch] = [
    no_relu,
    other_pairing,
    rotation_at_the_back,
    padded_positions,
    other_epsilon,
    rms_norm,
    raw_query_latent,
    unscaled_weights,
    rounded_weights,
    ties_to_the_highest_id,
    mask_after_top_k,
    one_key_too_few,
    a_row_sees_not_itself,
    target_not_normalized,
    reversed_kl,
    target_of_one_head,
    gradient_into_the_hidden_state,
    gradient_through_the_attended,
    loss_not_attached,
    loss_without_normalizer,
    value_of_the_rotary_part,
]
LOSSES = pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])


@LOSSES
@pytest.mark.parametrize("topk", [3, 5, 40])
def test_the_code_as_it_is_passes(sparse: bool, topk: int) -> None:
    parity(sparse, topk)


@LOSSES
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mistake_is_noticed(mutation: Patch, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        parity(sparse)


def test_the_data_holds_ties_at_the_edge_of_the_selection() -> None:
    """Else no rule about ties could be noticed."""
    _, layer, inputs = build(sparse=True, topk=5)
    with torch.no_grad():
        made = layer.indexer(inputs.x, inputs.qr, positions(LAYOUT, "cpu"))
        scores_TS = reference.score(made)
    edges = 0
    for t, visible in enumerate(oracle.visible_keys_of(LAYOUT)):
        row = scores_TS[t, list(visible)].sort(descending=True).values
        edges += len(row) > 5 and bool(row[4] == row[5])
    assert edges >= 5


# Seen in no set of keys while every visible key is selected: what a suite with k >= length would miss.
HIDDEN_WITHOUT_DROPPED_KEYS: list[Patch] = [no_relu, other_pairing, raw_query_latent, other_epsilon]


@pytest.mark.parametrize("mutation", HIDDEN_WITHOUT_DROPPED_KEYS, ids=lambda mutation: mutation.__name__)
def test_where_nothing_is_dropped_the_keys_show_nothing(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    def attended(topk: int) -> Tensor:
        _, layer, inputs = build(sparse=True, topk=topk)
        latent = LATENT_SEEN(inputs.qr, inputs.qr * torch.linspace(0.2, 5, 10))
        output: Tensor = layer(inputs.query, inputs.key, x=inputs.x, qr=latent, context=context_for(LAYOUT))
        return output.detach()

    right = {topk: attended(topk) for topk in (5, 40)}
    mutation(monkeypatch)
    assert torch.equal(attended(40), right[40]) and not torch.equal(attended(5), right[5])
