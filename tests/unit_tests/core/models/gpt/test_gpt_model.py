"""The whole model: layouts, loss, output layer, padding, precision, and what it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt import GPTModel, build_gpt_model, gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa import LossTracker, record_topk
from tests.unit_tests.core.tiny_model import assert_same_gradients, gradients, tiny_config

TOKENS = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def make_model(seed: int = 0, **overrides: Any) -> GPTModel:
    torch.manual_seed(seed)
    return build_gpt_model(tiny_config(**overrides))


def test_parameters_have_megatrons_names_and_the_stated_shapes() -> None:
    model = make_model()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    core = "decoder.layers.2.self_attention.core_attention.indexer."
    expected = {
        "embedding.word_embeddings.weight": (64, 32),
        "output_layer.weight": (64, 32),
        "decoder.final_layernorm.weight": (32,),
        "decoder.layers.0.input_layernorm.weight": (32,),
        "decoder.layers.0.pre_mlp_layernorm.weight": (32,),
        "decoder.layers.0.self_attention.linear_q_down_proj.weight": (20, 32),
        "decoder.layers.0.self_attention.q_layernorm.weight": (20,),
        "decoder.layers.0.self_attention.linear_q_up_proj.weight": (2 * 12, 20),
        "decoder.layers.0.self_attention.linear_kv_down_proj.weight": (16, 32),
        "decoder.layers.0.self_attention.kv_layernorm.weight": (12,),
        "decoder.layers.0.self_attention.linear_kv_up_proj.weight": (2 * 14, 12),
        "decoder.layers.0.self_attention.linear_proj.weight": (32, 12),
        "decoder.layers.0.mlp.linear_fc1.weight": (2, 24, 32),
        "decoder.layers.0.mlp.linear_fc2.weight": (32, 24),
        core + "linear_wq_b.weight": (16, 20),
        core + "linear_wk.weight": (8, 32),
        core + "k_norm.weight": (8,),
        core + "k_norm.bias": (8,),
        core + "linear_weights_proj.weight": (2, 32),
        "decoder.layers.2.mlp.router.weight": (4, 32),
        "decoder.layers.2.mlp.router.expert_bias": (4,),
        "decoder.layers.2.mlp.experts.linear_fc1.weight": (4, 2, 16, 32),
        "decoder.layers.2.mlp.experts.linear_fc2.weight": (4, 32, 16),
        "decoder.layers.2.mlp.shared_experts.linear_fc1.weight": (2, 40, 32),
        "decoder.layers.2.mlp.shared_experts.linear_fc2.weight": (32, 40),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert {name.replace("layers.1.", "layers.2.").replace("layers.0.", "layers.2.") for name in shapes} == {
        name.replace("layers.0.", "layers.2.") for name in expected
    }
    assert not any("layers.1.self_attention.core_attention" in name for name in shapes), "layer 2 reuses keys"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_loss_is_the_cross_entropy_of_the_logits(tied: bool) -> None:
    model = make_model(untie_embeddings_and_output_weights=not tied).eval()
    labels = TOKENS.roll(-1, 1)
    logits = model(TOKENS)
    assert logits.shape == (2, 13, 61)
    loss = model(TOKENS, labels=labels)
    assert loss.shape == (2, 13) and loss.dtype == torch.float32
    expected = -logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)


def test_a_tied_model_has_one_table_with_both_gradients() -> None:
    model = make_model(untie_embeddings_and_output_weights=False)
    assert not any(name.startswith("output_layer") for name in model.state_dict())
    table = model.embedding.word_embeddings.weight
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(model.logits(hidden), hidden @ table[:61].T)
    model(TOKENS, labels=TOKENS.roll(-1, 1)).mean().backward()
    unused = torch.ones(61, dtype=torch.bool).scatter(0, TOKENS.flatten(), False)
    # Tokens that are never read still get the output layer's gradient.
    assert table.grad is not None and bool(table.grad[:61][unused].abs().sum(1).gt(0).all())


def test_padded_vocabulary_takes_no_part() -> None:
    model = make_model()
    labels = TOKENS.roll(-1, 1)
    loss = model(TOKENS, labels=labels)
    loss.mean().backward()
    for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
        assert weight.shape == (64, 32) and weight.grad is not None
        assert weight.grad[61:].abs().sum() == 0
    with torch.no_grad():
        model.output_layer.weight[61:] = 100.0
    assert torch.equal(model(TOKENS, labels=labels), loss)


def test_labels_and_masks_leave_tokens_out() -> None:
    model = make_model().eval()
    labels = TOKENS.roll(-1, 1)
    whole = model(TOKENS, labels=labels)
    labels[0, 3] = -100
    assert (model(TOKENS, labels=labels) == 0).nonzero().tolist() == [[0, 3]]
    mask = torch.zeros(2, 13)
    mask[1, 4] = 1.0
    assert torch.equal(model(TOKENS, labels=TOKENS.roll(-1, 1), loss_mask=mask), whole * mask)


def test_loss_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (1000, 4):
        monkeypatch.setattr(gpt_model, "rows_in_budget", lambda vocab_size, rows=rows: rows)
        model = make_model()
        loss = model(TOKENS, labels=TOKENS.roll(-1, 1)).mean()
        loss.backward()
        found.append((loss, gradients(model)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert_same_gradients(found[1][1], found[0][1], atol=1e-7, rtol=1e-4)


def run_layout(
    tokens: Tensor, packed: PackedSeqParams | None, mask: Tensor
) -> tuple[Tensor, dict[int, list[set[int]]], dict[str, Tensor]]:
    """Loss of every valid token, selected keys by document position, and gradients, of one layout of TOKENS."""
    model = make_model().train()
    losses = LossTracker(normalizer=26)
    with record_topk(model) as record:
        loss = model(tokens, labels=tokens, packed_seq_params=packed, losses=losses)[mask]
    (loss.sum() / 26).backward()
    rows = mask.flatten().nonzero()[:, 0]
    start = torch.tensor([0] * 13 + [int(rows[13])] * 13)
    keys = {
        number: [
            {int(key) - int(first) for key in ids if key >= 0}
            for ids, first in zip(topk.indices_TK[rows], start, strict=True)
        ]
        for number, topk in record.items()
    }
    return loss, keys, gradients(model)


def test_batch_packed_and_padded_are_one_model() -> None:
    batch = run_layout(TOKENS, None, torch.ones(2, 13, dtype=torch.bool))
    packed = run_layout(
        TOKENS.view(1, -1), PackedSeqParams.from_offsets((0, 13, 26)), torch.ones(1, 26, dtype=torch.bool)
    )
    gaps = [torch.full((1, 3), 7), torch.full((1, 6), 11)]
    tokens = torch.cat((TOKENS[:1], gaps[0], TOKENS[1:], gaps[1]), dim=1)
    mask = torch.tensor([[True] * 13 + [False] * 3 + [True] * 13 + [False] * 6])
    padded = run_layout(tokens, PackedSeqParams.from_offsets((0, 13, 26), (0, 16, 35)), mask)
    for other in (packed, padded):
        torch.testing.assert_close(other[0], batch[0], atol=1e-6, rtol=1e-6)
        assert other[1] == batch[1] and set(batch[1]) == {1, 3}
        assert_same_gradients(other[2], batch[2], atol=1e-6, rtol=1e-4)


def test_documents_do_not_see_each_other() -> None:
    model = make_model().eval()
    packed = PackedSeqParams.from_offsets((0, 13, 26))
    first = model(TOKENS.view(1, -1), packed_seq_params=packed)
    changed = TOKENS.clone()
    changed[0] = (changed[0] + 7) % 61
    second = model(changed.view(1, -1), packed_seq_params=packed)
    assert torch.equal(first[0, 13:], second[0, 13:]) and not torch.equal(first[0, :13], second[0, :13])


def test_later_tokens_change_nothing_before_them() -> None:
    model = make_model().eval()
    changed = TOKENS.clone()
    changed[:, 8:] = (changed[:, 8:] + 5) % 61
    torch.testing.assert_close(model(changed)[:, :8], model(TOKENS)[:, :8])


def test_decoder_input_replaces_the_embedding() -> None:
    model = make_model().eval()
    embedded = F.embedding(TOKENS, model.embedding.word_embeddings.weight)
    assert torch.equal(model(None, decoder_input=embedded), model(TOKENS))


def test_a_dense_model_trains_too() -> None:
    model = make_model(experimental_attention_variant=None, num_moe_experts=None)
    model(TOKENS, labels=TOKENS.roll(-1, 1)).mean().backward()
    assert len(gradients(model)) == len(list(model.parameters()))
    assert not any("indexer" in name or "router" in name for name in model.state_dict())


def test_every_parameter_gets_a_gradient_and_a_frozen_indexer_none() -> None:
    for coeff in (0.5, None):
        model = make_model(dsa_indexer_loss_coeff=coeff, dsa_indexer_use_sparse_loss=coeff is not None)
        model(TOKENS, labels=TOKENS.roll(-1, 1)).mean().backward()
        named = dict(model.named_parameters())
        missing = set(named) - set(gradients(model))
        assert missing == {name for name in named if "indexer" in name and coeff is None}
        assert all(named[name].requires_grad != (name in missing) for name in named)


def test_bf16_model_keeps_its_fp32_islands() -> None:
    model = make_model(bf16=True, dsa_indexer_scoring_precision="bf16")
    wide = {name for name, t in model.state_dict().items() if t.dtype == torch.float32}
    assert wide == {f"decoder.layers.{i}.mlp.router.{part}" for i in (1, 2) for part in ("weight", "expert_bias")}
    assert model(TOKENS).dtype == torch.bfloat16
    loss = model(TOKENS, labels=TOKENS.roll(-1, 1))
    assert loss.dtype == torch.float32
    loss.mean().backward()
    assert all(bool(g.isfinite().all()) for g in gradients(model).values())


@pytest.mark.parametrize("k_norm_fp32", [False, True])
def test_the_config_names_what_a_bf16_model_keeps_in_fp32(k_norm_fp32: bool) -> None:
    model = make_model(bf16=True, dsa_indexer_scoring_precision="bf16", dsa_indexer_k_norm_fp32=k_norm_fp32)
    named = {name: tensor.dtype == torch.float32 for name, tensor in model.state_dict().items()}
    assert named == {name: model.config.computes_in_fp32(name) for name in named}
    assert any("k_norm" in name for name, wide in named.items() if wide) == k_norm_fp32


REFUSED = {
    "position_ids": (dict(position_ids=TOKENS), "position_ids was given.*pass None"),
    "attention_mask": (dict(attention_mask=TOKENS > 3), "attention_mask was given.*by packed_seq_params"),
    "two inputs": (dict(decoder_input=torch.zeros(2, 13, 32)), "give either input_ids or decoder_input"),
    "packed batch": (dict(packed_seq_params=PackedSeqParams.from_offsets((0, 13))), r"the input is \[2, 13\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_inputs_are_one_sentence(name: str) -> None:
    arguments, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        make_model()(TOKENS, **arguments)


SHAPES = {
    "labels of the other layout": ({"labels": TOKENS.T}, r"labels is \[13, 2\], but the input is \[2, 13\]"),
    "a flat mask": (
        {"labels": TOKENS, "loss_mask": torch.ones(26)},
        r"loss_mask is \[26\], but the input is \[2, 13\]",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_targets_of_another_shape_are_refused(name: str) -> None:
    """They may have as many entries, and would belong to other tokens."""
    arguments, message = SHAPES[name]
    with pytest.raises(ValueError, match=message):
        make_model()(TOKENS, **arguments)


def test_tokens_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input is \[13\], but it takes token ids \[b, s\]"):
        make_model()(TOKENS[0])


def test_casting_is_refused_where_it_would_round_what_is_fp32() -> None:
    with pytest.raises(ValueError, match="router's weight is torch.bfloat16, .* build it with bf16=True"):
        make_model().to(torch.bfloat16)(TOKENS)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast.*bf16=True"):
        make_model()(TOKENS)


def test_a_model_can_be_pickled() -> None:
    model = make_model()
    assert torch.equal(pickle.loads(pickle.dumps(model))(TOKENS), model(TOKENS))


def test_no_input_is_refused() -> None:
    with pytest.raises(ValueError, match="give either input_ids or decoder_input"):
        make_model()(None)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"])
def test_parallel_sizes_are_refused(name: str) -> None:
    config = tiny_config()
    setattr(config, name, 2)
    with pytest.raises(ValueError, match=f"{name}=2 was given.*set it to 1"):
        build_gpt_model(config)


@pytest.mark.parametrize("name", ["pre_process", "post_process"])
def test_pipeline_stages_are_refused(name: str) -> None:
    config = tiny_config()
    arguments: dict[str, Any] = {name: False}
    with pytest.raises(ValueError, match=f"{name}=False.*leave both True"):
        GPTModel(config, None, 64, 0, **arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "padded"])
def test_a_step_never_waits_for_the_device(packed: bool) -> None:
    """After one step (which fills caches), forward and backward of another batch of the layout synchronize nothing."""
    torch.manual_seed(0)
    overrides: dict[str, Any] = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1)
    config = tiny_config(bf16=True, dsa_indexer_scoring_precision="bf16", recompute_granularity="full", **overrides)
    model = build_gpt_model(config, device="cuda").train()
    params = PackedSeqParams.from_offsets((0, 13, 20), (0, 16, 26), device="cuda") if packed else None
    tokens = TOKENS.view(1, 26) if packed else TOKENS
    batches = [tokens.cuda(), ((tokens + 5) % 61).cuda()]
    for index, batch in enumerate(batches):
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        try:
            model(batch, labels=batch, packed_seq_params=params).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(bool(g.isfinite().all()) for g in gradients(model).values())


@pytest.mark.gpu
def test_gpu_equals_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = build_gpt_model(tiny_config(params_dtype=torch.float32), device=device).train()
        if found:
            model.load_state_dict(found[0][2])
        loss = model(TOKENS.to(device), labels=TOKENS.roll(-1, 1).to(device)).mean()
        loss.backward()
        cpu_gradients = {name: g.cpu() for name, g in gradients(model).items()}
        found.append((loss.detach().cpu(), cpu_gradients, model.state_dict()))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert_same_gradients(found[1][1], found[0][1], atol=1e-5, rtol=1e-3)
