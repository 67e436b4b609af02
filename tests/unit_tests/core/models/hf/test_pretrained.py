"""Whole checkpoints in and out: round trips, what transformers makes of an export, damage, MTP, FP8, memory."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from megatron.core.models.gpt import GPTModel, build_gpt_model, get_preset
from megatron.core.models.hf import from_pretrained, load_hf_weights, save_pretrained
from megatron.core.models.hf.block_fp8 import dequantize
from megatron.core.models.hf.tensor_folder import INDEX_NAME, SINGLE_NAME, TensorFolder
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, hf_config, load_meta, tensors
from tests.unit_tests.core.models.hf.observe import clear_cut


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / SINGLE_NAME)
    return folder


def same_tensors(folder: Path, expected: dict[str, Tensor]) -> None:
    with TensorFolder(folder) as files:
        assert files.shapes.keys() == expected.keys()
        for name, tensor in expected.items():
            read = files.read(name)
            assert read.dtype == tensor.dtype, name
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)), name


def assert_same_in_transformers(model: GPTModel, folder: Path) -> None:
    """The exported folder loads without a remark, and gives the model's logits."""
    input_ids = clear_cut(model.eval())
    with torch.no_grad():
        ours = model(input_ids)
    theirs = transformers_logits(folder, input_ids)
    assert (ours - theirs).abs().max() < 5e-4
    assert (theirs[:, :, 1:] - ours[:, :, :-1]).abs().max() > 0.1


def transformers_logits(folder: Path, input_ids: Tensor) -> Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(input_ids).logits


# ---- round trips ----


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bit_equal(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    save_pretrained(from_pretrained(FIXTURES / name), tmp_path / "out", max_shard_bytes=max_shard_bytes)
    same_tensors(tmp_path / "out", tensors(name, "model"))
    assert (tmp_path / "out" / INDEX_NAME).exists() is (max_shard_bytes < 10**9)
    again = from_pretrained(tmp_path / "out")
    assert again.config == from_pretrained(FIXTURES / name).config


@pytest.mark.parametrize("name", NAMES)
def test_bf16_round_trip_is_bit_equal(name: str, tmp_path: Path) -> None:
    """As transformers holds it: the router stays FP32 in a BF16 model, all else is BF16."""
    islands = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    stored = {k: v if k.endswith(islands) else v.bfloat16() for k, v in tensors(name, "model").items()}
    write_checkpoint(tmp_path / "in", hf_config(name), stored)
    model = from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    assert model.config.bf16 and model.config.dsa_indexer_scoring_precision == "bf16"
    save_pretrained(model, tmp_path / "out")
    same_tensors(tmp_path / "out", stored)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_fp32_import_scores_in_fp32_unless_told_otherwise() -> None:
    folder = FIXTURES / "a_glm_plain"
    assert from_pretrained(folder).config.dsa_indexer_scoring_precision == "fp32"
    model = from_pretrained(folder, dsa_indexer_scoring_precision="bf16")
    assert model.config.dsa_indexer_scoring_precision == "bf16"
    with pytest.raises(ValueError, match="dtype torch.float16 is not supported"):
        from_pretrained(folder, dtype=torch.float16)


def test_import_starts_counters_at_zero_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    model = from_pretrained(FIXTURES / "a_glm_plain")
    assert torch.equal(torch.get_rng_state(), before)
    counters = [b for n, b in model.named_buffers() if n.endswith("local_tokens_per_expert")]
    assert len(counters) == 3 and not any(counter.any() for counter in counters)


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_padding_comes_and_goes(tied: bool, tmp_path: Path) -> None:
    name, rows = "a_glm_plain", 100
    weights = dict(tensors(name, "model"))
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[key] = weights[key][:rows].clone()
    if tied:
        del weights["lm_head.weight"]
    config = hf_config(name) | {"vocab_size": rows, "tie_word_embeddings": tied}
    model = from_pretrained(write_checkpoint(tmp_path / "in", config, weights))
    table = model.embedding.word_embeddings.weight
    assert table.shape[0] == 128 and not table[rows:].any()
    save_pretrained(model, tmp_path / "out")
    same_tensors(tmp_path / "out", weights)
    assert_same_in_transformers(model, tmp_path / "out")


# ---- exports that transformers loads ----


def train_two_steps(model: GPTModel, input_ids: Tensor) -> None:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    labels = torch.full_like(input_ids, -100)
    labels[:, :-1] = input_ids[:, 1:]
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        (model(input_ids, labels=labels).sum() / labels.ge(0).sum()).backward()
        optimizer.step()
    model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_trained_model_loads_in_transformers_and_gives_our_logits(name: str, tmp_path: Path) -> None:
    input_ids = tensors(name, "inputs")["input_ids"]
    model = from_pretrained(FIXTURES / name, dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=True)
    train_two_steps(model, input_ids)
    save_pretrained(model, tmp_path / "out")
    written, before = load_file(tmp_path / "out" / SINGLE_NAME), tensors(name, "model")
    moved = {key for key in written if not torch.equal(written[key], before[key])}
    assert {"model.norm.weight", "model.layers.0.self_attn.indexer.wk.weight"} <= moved
    assert_same_in_transformers(model, tmp_path / "out")


def test_model_that_was_never_imported_exports(tmp_path: Path) -> None:
    """A preset trained from scratch, IndexShare and padded vocabulary included."""
    torch.manual_seed(7)
    config = get_preset("tiny-glm5")
    config.dsa_indexer_scoring_precision = "fp32"
    model = build_gpt_model(config)
    input_ids = torch.randint(0, 257, (2, 48))
    train_two_steps(model, input_ids)
    save_pretrained(model, tmp_path / "out")
    assert_same_in_transformers(model, tmp_path / "out")
    words = json.loads((tmp_path / "out" / "config.json").read_text())["indexer_types"]
    assert words == ["full", "shared", "full", "shared"]


def test_tokenizer_and_special_tokens_are_taken_over(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    ids = {"eos_token_id": [7, 8], "bos_token_id": None, "pad_token_id": 3}
    (origin / "config.json").write_text(json.dumps(hf_config("a_glm_plain") | ids | {"rms_norm_eps": 0.5}))
    (origin / "tokenizer.json").write_text("{}")
    save_pretrained(from_pretrained(FIXTURES / "a_glm_plain"), tmp_path / "out", tokenizer_from=origin)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", SINGLE_NAME, "tokenizer.json"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in ids} == ids
    assert written["rms_norm_eps"] == 1e-5


def test_failed_export_leaves_nothing(tmp_path: Path) -> None:
    model = from_pretrained(FIXTURES / "a_glm_plain")
    with pytest.raises(ValueError, match="nowhere/config.json does not exist"):
        save_pretrained(model, tmp_path / "out", tokenizer_from=tmp_path / "nowhere")
    model.config.dsa_indexer_scoring_relu = False
    with pytest.raises(ValueError, match="dsa_indexer_scoring_relu"):
        save_pretrained(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# ---- checkpoints that do not fit ----


def test_every_wrong_tensor_is_listed(tmp_path: Path) -> None:
    weights = dict(tensors("a_glm_plain", "model"))
    for key in ("lm_head.weight", "model.layers.2.mlp.experts.5.up_proj.weight"):
        del weights[key]
    weights["model.layers.1.self_attn.extra.weight"] = torch.ones(1)
    weights["model.layers.7.mlp.down_proj.weight"] = torch.ones(1)
    weights["model.norm.weight"] = torch.ones(63)
    folder = write_checkpoint(tmp_path / "in", hf_config("a_glm_plain"), weights)
    with pytest.raises(ValueError, match="do not fit its config.json") as refusal:
        from_pretrained(folder)
    message = str(refusal.value)
    assert "2 missing: lm_head.weight, model.layers.2.mlp.experts.5.up_proj.weight;" in message
    assert "2 unexpected: model.layers.1.self_attn.extra.weight, model.layers.7.mlp.down_proj.weight;" in message
    assert "1 of another shape: model.norm.weight (63,) instead of (64,)" in message


def test_indexer_weights_of_sharing_layers_are_refused(tmp_path: Path) -> None:
    weights = dict(tensors("b_glm_indexshare", "model"))
    weights["model.layers.2.self_attn.indexer.wk.weight"] = torch.ones(16, 64)
    with pytest.raises(ValueError, match="1 unexpected: model.layers.2.self_attn.indexer.wk.weight"):
        from_pretrained(write_checkpoint(tmp_path / "in", hf_config("b_glm_indexshare"), weights))


def test_nothing_is_loaded_from_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    weights = dict(tensors("a_glm_plain", "model")) | {"extra": torch.ones(1)}
    folder = write_checkpoint(tmp_path / "in", hf_config("a_glm_plain"), weights)
    model = from_pretrained(FIXTURES / "d_glm_short", dsa_indexer_topk=8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="1 unexpected: extra"):
        load_hf_weights(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, torch.float32), (1e300, torch.float64)], ids=["nan", "large"])
def test_weights_that_are_not_finite_are_refused(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """A frozen indexer would select by position, and no loss would show it."""
    name, weights = "model.layers.0.self_attn.indexer.wk.weight", dict(tensors("a_glm_plain", "model"))
    weights[name] = weights[name].to(dtype).clone()
    weights[name][0, 0] = value
    folder = write_checkpoint(tmp_path / "in", hf_config("a_glm_plain"), weights)
    with pytest.raises(
        ValueError, match=f"^{name} holds values that are not finite in torch.float32: load another copy"
    ):
        from_pretrained(folder)


def test_irregular_schedule_by_override(tmp_path: Path) -> None:
    name, schedule = "b_glm_indexshare", [1, 1, 0, 0, 1, 1]
    weights = dict(tensors(name, "model"))
    indexer = {k: v for k, v in weights.items() if k.startswith("model.layers.4.self_attn.indexer")}
    weights |= {k.replace("layers.4", "layers.5"): v.clone() for k, v in indexer.items()}
    words = ["full" if selects else "shared" for selects in schedule]
    folder = write_checkpoint(tmp_path / "in", hf_config(name) | {"indexer_types": words}, weights)
    with pytest.raises(ValueError, match="indexer_types is irregular"):
        from_pretrained(folder)
    model = from_pretrained(folder, dsa_indexer_topk_freq=schedule)
    save_pretrained(model, tmp_path / "out")
    assert_same_in_transformers(model, tmp_path / "out")


def test_load_into_a_model_that_exists() -> None:
    golden = from_pretrained(FIXTURES / "c_v32_yarn")
    model = build_gpt_model(golden.config)
    load_hf_weights(model, FIXTURES / "c_v32_yarn")
    assert all(torch.equal(t, golden.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layernorm_epsilon": 1e-6, "attention_latent_norm_epsilon": 1e-6}, "rms_norm_eps \\(1e-06, checkpoint 1e-05"),
        ({"rotary_base": 77.0}, "rope_parameters"),
        ({"moe_router_topk_scaling_factor": None}, "routed_scaling_factor \\(1.0, checkpoint 2.5"),
        ({"dsa_indexer_topk": 9}, "index_topk \\(9, checkpoint 8"),
        ({"dsa_indexer_rope_interleaved": False}, "model_type \\('deepseek_v32', checkpoint 'glm_moe_dsa'"),
    ],
)
def test_load_into_a_model_of_other_options_is_refused(change: dict[str, Any], named: str) -> None:
    model = from_pretrained(FIXTURES / "a_glm_plain", **change)
    with pytest.raises(ValueError, match=f"computes something else .*{named}"):
        load_hf_weights(model, FIXTURES / "a_glm_plain")


def test_load_allows_what_only_changes_rounding_or_training() -> None:
    changes = dict(dsa_indexer_rotate_activation=True, attention_latent_norm_epsilon=1e-5, dsa_indexer_loss_coeff=1.0)
    load_hf_weights(from_pretrained(FIXTURES / "a_glm_plain", **changes), FIXTURES / "a_glm_plain")


# ---- what an import says ----


def test_latent_norms_are_spoken_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        from_pretrained(FIXTURES / "a_glm_plain")
    assert "vLLM, SGLang and Megatron-LM use 1e-05" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        from_pretrained(FIXTURES / "a_glm_plain", attention_latent_norm_epsilon=1e-5)
        from_pretrained(FIXTURES / "c_v32_yarn")
    assert caplog.text == ""


def with_mtp(name: str) -> dict[str, Tensor]:
    """The golden weights and one multi-token-prediction layer behind the last, named as on the hub."""
    weights = dict(tensors(name, "model"))
    layers = load_meta(name)["indexer_types"]
    last = f"model.layers.{len(layers) - 1}."
    extra = {k.replace(last, f"model.layers.{len(layers)}."): v.clone() for k, v in weights.items() if last in k}
    for part in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight", "shared_head.norm.weight"):
        extra[f"model.layers.{len(layers)}.{part}"] = torch.ones(64)
    return weights | extra


@pytest.mark.parametrize("told", [{"num_nextn_predict_layers": 1}, {}])
@pytest.mark.parametrize("name", NAMES[:3])
def test_mtp_layers_are_skipped_only_when_asked(
    name: str, told: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "in", hf_config(name) | told, with_mtp(name))
    layer, count = len(load_meta(name)["indexer_types"]), len(with_mtp(name)) - len(tensors(name, "model"))
    with pytest.raises(ValueError, match=f"{count} tensors of multi-token-prediction layers \\[{layer}\\].*skip_mtp"):
        from_pretrained(folder)
    with caplog.at_level(logging.WARNING):
        model = from_pretrained(folder, skip_mtp=True)
    assert f"Skipped {count} tensors of multi-token-prediction layers [{layer}]" in caplog.text
    save_pretrained(model, tmp_path / "out")
    same_tensors(tmp_path / "out", tensors(name, "model"))


def test_mtp_layers_are_known_by_the_config_too(tmp_path: Path) -> None:
    weights = {key: value for key, value in with_mtp("a_glm_plain").items() if "eh_proj" not in key}
    folder = write_checkpoint(tmp_path / "in", hf_config("a_glm_plain") | {"num_nextn_predict_layers": 1}, weights)
    from_pretrained(folder, skip_mtp=True)


def test_skipping_mtp_does_not_skip_strays(tmp_path: Path) -> None:
    weights = dict(tensors("a_glm_plain", "model")) | {"model.layers.4.mlp.down_proj.weight": torch.ones(1)}
    folder = write_checkpoint(tmp_path / "in", hf_config("a_glm_plain"), weights)
    with pytest.raises(ValueError, match="1 unexpected: model.layers.4.mlp.down_proj.weight"):
        from_pretrained(folder, skip_mtp=True)


# ---- FP8 ----


def quantized(name: str, block: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors as a hub FP8 checkpoint stores them, what they mean): projections in FP8, the rest as it is."""
    stored, meant = {}, {}
    for key, weight in tensors(name, "model").items():
        plain = not key.endswith("_proj.weight") or "weights_proj" in key
        if plain:
            stored[key] = meant[key] = weight
            continue
        rows, columns = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
        padded = torch.zeros(rows * block[0], columns * block[1])
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.view(rows, block[0], columns, block[1])
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448
        values = (blocks / scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
        stored[key], stored[f"{key}_scale_inv"] = values.to(torch.float8_e4m3fn), scale
        meant[key] = dequantize(stored[key], scale, block)
    return stored, meant


def test_fp8_checkpoint_in_shards_of_random_order(tmp_path: Path) -> None:
    """Weights and their scales land in different files; nothing depends on the order of names or shards."""
    name, block = "c_v32_yarn", (16, 24)
    stored, meant = quantized(name, block)
    assert sum(key.endswith("_scale_inv") for key in stored) == 100
    names = list(stored)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(3)).tolist()
    folder = tmp_path / "in"
    folder.mkdir()
    weight_map = {}
    for shard in range(4):
        part = [names[i] for i in order[shard::4]]
        save_file({key: stored[key].contiguous() for key in part}, folder / f"part{shard}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{shard}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(hf_config(name) | {"quantization_config": quantization}))

    model = from_pretrained(folder)
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    save_pretrained(model, tmp_path / "out")
    same_tensors(tmp_path / "out", meant)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_fp8_scoring_leaves_the_indexers_weights_alone(tmp_path: Path) -> None:
    """What keys and queries are scored in is no storage type: engines fuse these weights in BF16."""
    model = from_pretrained(FIXTURES / "c_v32_yarn", dtype=torch.bfloat16)
    model.config.dsa_kernel_backend, model.config.dsa_indexer_scoring_precision = "cudnn", "fp8"
    save_pretrained(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / SINGLE_NAME)
    assert {tensor.dtype for name, tensor in written.items() if ".indexer." in name} == {torch.bfloat16}
    assert not any(name.endswith("_scale_inv") for name in written)


# ---- models that cannot be written or filled ----


def test_sharded_parameters_are_loaded_in_place_and_not_written(tmp_path: Path) -> None:
    """Over several ranks: test_ranks.py."""
    model = from_pretrained(FIXTURES / "a_glm_plain")
    expected = model.decoder.final_layernorm.weight.detach().clone()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        norm = model.decoder.final_layernorm
        norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight.data, init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match="1 parameters are sharded .*final_layernorm"):
            save_pretrained(model, tmp_path / "out")
        with torch.no_grad():
            norm.weight.zero_()
        load_hf_weights(model, FIXTURES / "a_glm_plain")
        assert torch.equal(norm.weight.to_local(), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_without_a_name_there_are_refused(tmp_path: Path) -> None:
    model = from_pretrained(FIXTURES / "a_glm_plain")
    model.decoder.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 tensors without a Hugging Face counterpart.*decoder.adapter.bias"):
        save_pretrained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="configuration is a NoneType"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "out")
    assert os.listdir(tmp_path) == []
