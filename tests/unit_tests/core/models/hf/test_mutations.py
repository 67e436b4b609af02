"""The golden comparison can fail: each typical mistake, made on purpose, turns it red, and by the measured amount.

Every golden model comes with measurements of how far a mistake moves it, made independently of this package: rows of
selected keys that change (over all layers, and in the first one), the largest change of a logit, and of an index score
in the first layer. A mistake that moves nothing beyond the tolerances (the Hadamard rotation anywhere; most indexer
mistakes where no key is dropped, but for their scores) must stay green, and the others must turn red. The mutated model
must also move as far as was measured, which shows that the mistake made is the one meant.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.common.embeddings.rope_utils import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hf import from_pretrained
from megatron.core.transformer.experimental_attention_variant.dsa import Layout, Segment, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TopK
from megatron.core.transformer.experimental_attention_variant.dsa.indexer import DSAIndexer, IndexerKeyNorm
from megatron.core.transformer.experimental_attention_variant.dsa.reference import ReferenceBackend
from megatron.core.transformer.moe.router import TopKRouter
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, hf_config, load_meta, tensors
from tests.unit_tests.core.models.hf.observe import as_batch, differences, golden_sets, max_difference, run

Change = Callable[[GPTModel, pytest.MonkeyPatch], None]

# Mistakes that a configuration can make: our fields, from the golden config.json.
BY_CONFIG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "indexer_rope_style_flipped": lambda hf: {"dsa_indexer_rope_interleaved": hf["model_type"] != "glm_moe_dsa"},
    "indexer_no_relu": lambda hf: {"dsa_indexer_scoring_relu": False},
    "indexer_k_norm_eps_1e-5": lambda hf: {"dsa_indexer_k_norm_epsilon": 1e-5},
    "latent_norm_eps_1e-5": lambda hf: {"attention_latent_norm_epsilon": 1e-5},
    "rms_norm_eps_other": lambda hf: {"layernorm_epsilon": 1e-6 if hf["rms_norm_eps"] == 1e-5 else 1e-5},
    "all_eps_1e-5": lambda hf: dict.fromkeys(
        ("layernorm_epsilon", "attention_latent_norm_epsilon", "dsa_indexer_k_norm_epsilon"), 1e-5
    ),
    # What Megatron's defaults for the two epsilons would do.
    "one_epsilon_everywhere": lambda hf: {"attention_latent_norm_epsilon": None, "dsa_indexer_k_norm_epsilon": None},
    "indexer_hadamard_on": lambda hf: {"dsa_indexer_rotate_activation": True},
    "topk_minus_one": lambda hf: {"dsa_indexer_topk": hf["index_topk"] - 1},
    "main_rope_half_split": lambda hf: {"mla_rotary_interleaved": False},
    "router_no_renorm": lambda hf: {"norm_topk_prob": False},
    "router_no_scaling": lambda hf: {"moe_router_topk_scaling_factor": 1.0},
    "router_groups_off": lambda hf: {"moe_router_num_groups": None, "moe_router_group_topk": None},
}


def attentions(model: GPTModel) -> Iterator[Any]:
    for layer in model.decoder.layers:
        yield layer.self_attention


def rope_at_back(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    front = DSAIndexer._rotate

    def back(self: DSAIndexer, q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        width = self.dsa.qk_pos_emb_head_dim
        q, k = front(self, q.roll(width, -1), k.roll(width, -1), *rest)
        return q.roll(-width, -1), k.roll(-width, -1)

    patch.setattr(DSAIndexer, "_rotate", back)


def q_from_raw_latent(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for attention in attentions(model):
        kept: dict[str, Tensor] = {}
        attention.linear_q_down_proj.register_forward_hook(lambda m, a, out, kept=kept: kept.update(raw=out))
        attention.core_attention.register_forward_pre_hook(
            lambda m, args, kwargs, kept=kept: (args, kwargs | {"qr": kept["raw"]}), with_kwargs=True
        )


def x_without_input_norm(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.decoder.layers:
        kept: dict[str, Tensor] = {}
        layer.input_layernorm.register_forward_pre_hook(lambda m, args, kept=kept: kept.update(x=args[0]))
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda m, args, kwargs, kept=kept: (args, kwargs | {"x": kept["x"]}), with_kwargs=True
        )


def k_norm_is_rms(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    def rms(self: IndexerKeyNorm, k_TD: Tensor) -> Tensor:
        return F.rms_norm(k_TD, self.weight.shape, self.weight, self.eps)

    patch.setattr(IndexerKeyNorm, "forward", rms)


def k_norm_no_bias(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("k_norm.bias"):
            parameter.data.zero_()


def not_causal(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    """Choose among all keys of the document and only then drop the future ones."""

    def select(self: ReferenceBackend, indexer: Any, layout: Layout, k: int) -> TopK:
        whole = [
            Segment(row, row + 1, segment.key_start, segment.row_stop - segment.row_start - 1)
            for segment in layout.segments
            for row in range(segment.row_start, segment.row_stop)
        ]
        topk = causal(self, indexer, Layout(layout.num_rows, layout.num_keys, tuple(whole)), k)
        return ascending(topk.indices_TK.masked_fill(topk.indices_TK >= row_bounds(layout, "cpu")[1][:, None], -1))

    causal = ReferenceBackend.select
    patch.setattr(ReferenceBackend, "select", select)


def ascending(ids_TK: Tensor) -> TopK:
    last = torch.iinfo(ids_TK.dtype).max
    ids_TK = ids_TK.masked_fill(ids_TK < 0, last).sort(-1).values
    ids_TK = ids_TK.masked_fill(ids_TK == last, -1).int()
    return TopK(ids_TK, (ids_TK >= 0).sum(-1).int(), None)


def scale_dropped(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    scaled = DSAIndexer.forward

    def forward(self: DSAIndexer, *args: Any) -> Any:
        operands = scaled(self, *args)
        factor = (self.dsa.n_heads * self.dsa.head_dim) ** 0.5
        return type(operands)(operands.q_TID, operands.k_SD, operands.w_TI * factor)

    patch.setattr(DSAIndexer, "forward", forward)


def dense_attention(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    """Attend to every visible key, whatever was selected; the selection is still watched."""

    def attend(self: ReferenceBackend, attention: Any, topk: TopK, layout: Layout) -> Any:
        starts, ends = row_bounds(layout, "cpu")
        ids_TS = starts[:, None] + torch.arange(layout.num_keys)
        return sparse(self, attention, ascending(ids_TS.masked_fill(ids_TS >= ends[:, None], -1)), layout)

    sparse = ReferenceBackend.attend
    patch.setattr(ReferenceBackend, "attend", attend)


def bias_ignored(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        assert router.expert_bias is not None
        router.expert_bias.zero_()


def bias_in_weights(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    def forward(self: TopKRouter, hidden: Tensor) -> Any:
        routing = plain(self, hidden)
        weights = (routing.scores_TE + self.expert_bias).gather(1, routing.experts_TK)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.moe_router_topk_scaling_factor
        return routing._replace(weights_TK=weights)

    plain = TopKRouter.forward
    patch.setattr(TopKRouter, "forward", forward)


def group_score_top1(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    def choose(self: TopKRouter, scores_TE: Tensor) -> Tensor:
        assert self.config.moe_router_num_groups and self.config.moe_router_group_topk
        choice = (scores_TE + self.expert_bias).unflatten(-1, (self.config.moe_router_num_groups, -1))
        kept = choice.amax(-1).topk(self.config.moe_router_group_topk, dim=-1).indices
        mask = torch.ones(choice.shape[:2], dtype=torch.bool).scatter_(1, kept, False)
        return choice.masked_fill(mask[..., None], -torch.inf).flatten(1).topk(self.config.moe_router_topk).indices

    patch.setattr(TopKRouter, "_choose", choose)


def shared_experts_dropped(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for name, parameter in model.named_parameters():
        if ".shared_experts.linear_fc2" in name:
            parameter.data.zero_()


def shared_layers_use_first_full(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for attention in attentions(model):
        if attention.core_attention.indexer is None:
            attention.core_attention.source_layer = 1


def softmax_mscale_dropped(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    for attention in attentions(model):
        config = attention.config
        attention.core_attention.softmax_scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5


def yarn_frequencies_dropped(model: GPTModel, patch: pytest.MonkeyPatch) -> None:
    def plain(module: nn.Module) -> None:
        if hasattr(module, "rotary"):
            module.rotary = RotaryEmbedding(module.rotary.dim, module.rotary.base, module.rotary.factor)

    model.apply(plain)


# Mistakes that only other code can make.
BY_CODE: dict[str, Change] = {
    "indexer_rope_at_back": rope_at_back,
    "indexer_q_from_raw_latent": q_from_raw_latent,
    "indexer_x_without_input_norm": x_without_input_norm,
    "indexer_k_norm_is_rms": k_norm_is_rms,
    "indexer_k_norm_no_bias": k_norm_no_bias,
    "indexer_not_causal": not_causal,
    "indexer_scale_dropped": scale_dropped,
    "dense_attention": dense_attention,
    "router_bias_ignored": bias_ignored,
    "router_bias_in_weights": bias_in_weights,
    "router_group_score_top1": group_score_top1,
    "shared_experts_dropped": shared_experts_dropped,
    "shared_layers_use_first_full": shared_layers_use_first_full,
    "yarn_softmax_mscale_dropped": softmax_mscale_dropped,
    "yarn_frequencies_dropped": yarn_frequencies_dropped,
}

# The factor on cos and sin is 1 in every golden model, so dropping it somewhere is no change; test_rope.py covers it.
NOT_MADE = {"yarn_factor_not_in_indexer"}


@cache
def golden(name: str) -> dict[str, Tensor]:
    return golden_sets(tensors(name, "outputs"))


@contextmanager
def mutated(name: str, mistake: str) -> Iterator[GPTModel]:
    overrides = BY_CONFIG[mistake](hf_config(name)) if mistake in BY_CONFIG else {}
    model = from_pretrained(FIXTURES / name, **overrides).eval()
    with pytest.MonkeyPatch.context() as patch:
        if mistake in BY_CODE:
            BY_CODE[mistake](model, patch)
        yield model


def cases() -> list[tuple[str, str]]:
    return [(name, mistake) for name in NAMES for mistake in load_meta(name)["sensitivity"] if mistake not in NOT_MADE]


def test_every_measured_mistake_is_made() -> None:
    assert {mistake for _, mistake in cases()} == BY_CONFIG.keys() | BY_CODE.keys()


@pytest.mark.parametrize(("name", "mistake"), cases())
def test_mistake_turns_the_comparison_red(name: str, mistake: str) -> None:
    measured = load_meta(name)["sensitivity"][mistake]
    with mutated(name, mistake) as model:
        values = run(model, as_batch(tensors(name, "inputs")["input_ids"]))
    wrong = differences(values, golden(name))
    visible = measured["sets_changed"] or measured["max_dlogits"] != 0 or measured["max_dindex_scores_layer0"] > 1e-4
    assert bool(wrong) is bool(visible)

    # In the first layer the mistake acts alone, and its effect is as large as measured.
    assert abs(wrong.get("selected.0", 0) - measured["sets_changed_layer0"]) <= 1
    scores = max_difference("index_scores.0", values["index_scores.0"], golden(name)["index_scores.0"])
    assert math.isclose(scores, measured["max_dindex_scores_layer0"], rel_tol=1e-3, abs_tol=1e-5)
    # Later layers of a wrong model have no margin, so a last bit can move a row: close is enough.
    changed = sum(off for key, off in wrong.items() if key in full_layers(name))
    assert abs(changed - measured["sets_changed"]) <= 6
    if math.isfinite(float(measured["max_dlogits"])):
        logits = max_difference("logits", values["logits"], golden(name)["logits"])
        assert math.isclose(logits, measured["max_dlogits"], rel_tol=0.25, abs_tol=5e-4)


def full_layers(name: str) -> set[str]:
    words = load_meta(name)["indexer_types"]
    return {f"selected.{layer}" for layer, word in enumerate(words) if word == "full"}
