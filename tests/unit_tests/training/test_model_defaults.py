"""Which model the flags start from, and that the command line takes it."""

import json
from pathlib import Path

import pytest

from megatron.core.models.gpt import get_preset
from megatron.core.models.hf import config_from_hf, read_config
from megatron.training.arguments import CommandLineError, parse_args
from megatron.training.model_defaults import model_defaults
from tests.unit_tests.core.models.hf.golden import FIXTURES, hf_config

FOLDER = str(FIXTURES / "b_glm_indexshare")


def test_nothing_preset_or_folder() -> None:
    assert model_defaults({"lr": ["1"]}) is None
    assert model_defaults({"preset": ["glm-5", "tiny-glm5"]}) == get_preset("tiny-glm5")
    assert model_defaults({"load-hf": [FOLDER]}) == config_from_hf(read_config(FOLDER))


def test_load_hf_sets_the_models_flags_and_given_flags_win() -> None:
    config = parse_args(["--load-hf", FOLDER, "--dsa-indexer-loss-coeff", "0.5", "--bf16"])
    expected = config_from_hf(read_config(FOLDER), dsa_indexer_loss_coeff=0.5, bf16=True)
    assert config.model == expected
    assert config.checkpoint.load_hf == FOLDER and not config.checkpoint.skip_mtp
    assert config.model.dsa_indexer_scoring_precision == "bf16"


def test_an_irregular_schedule_is_read_with_its_list(tmp_path: Path) -> None:
    words = ["full", "full", "shared", "shared", "full", "full"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config("b_glm_indexshare") | {"indexer_types": words}))
    with pytest.raises(CommandLineError, match="indexer_types is irregular"):
        parse_args(["--load-hf", str(tmp_path)])
    for spelling in (["1", "1", "0", "0", "1", "1"], ["[1]*2+[0]*2+[1]*2"]):
        config = parse_args(["--load-hf", str(tmp_path), "--dsa-indexer-topk-freq", *spelling])
        assert config.model.dsa_indexer_topk_freq == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--load-hf", FOLDER, "--preset", "glm-5"], "both describe the model"),
        (["--load-hf", "nowhere"], "nowhere/config.json does not exist"),
        (["--preset", "glm5"], "--preset glm5 is unknown: did you mean glm-5?"),
        (["--skip-mtp"], "--skip-mtp has no checkpoint to skip in"),
    ],
)
def test_contradictions_are_one_sentence(flags: list[str], message: str) -> None:
    with pytest.raises(CommandLineError, match=message.replace("?", "\\?")):
        parse_args(flags)


FP8 = ["--dsa-kernel-backend", "cudnn", "--dsa-indexer-loss-coeff", "0"]


def test_matching_an_engine_sets_what_it_needs_and_says_so() -> None:
    config = parse_args(["--preset", "glm-5", "--dsa-match-engine", "sglang", *FP8])
    model = config.model
    assert (model.dsa_indexer_scoring_precision, model.dsa_indexer_fp8_scale_format) == ("fp8", "fp32")
    assert model.dsa_indexer_rope_fp32 and model.dsa_indexer_rope_table_dtype == "fp32"
    assert model.attention_latent_norm_epsilon == model.layernorm_epsilon == 1e-5
    (notice,) = config.notices
    assert notice.startswith("Matching sglang: ") and "dsa_indexer_rope_fp32 False -> True" in notice
    assert parse_args(["--preset", "glm-5"]).notices == ()


def test_matching_follows_the_checkpoints_rotary_pairs() -> None:
    config = parse_args(["--load-hf", FOLDER, "--dsa-match-engine", "vllm", *FP8])
    assert config.model.dsa_indexer_rope_interleaved
    with pytest.raises(CommandLineError, match="runs DeepSeek-V3.2 alone"):
        parse_args(["--load-hf", FOLDER, "--dsa-match-engine", "deepseek", *FP8])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-dsa-indexer-rope-fp32"], "means dsa_indexer_rope_fp32=True, but it is False"),
        (["--dsa-indexer-scoring-precision", "bf16"], "means dsa_indexer_scoring_precision='fp8', but it is 'bf16'"),
        (["--dsa-indexer-rotate-activation"], "means dsa_indexer_rotate_activation=False, but it is True"),
        (["--dsa-kernel-backend", "none"], "needs dsa_kernel_backend='cudnn', but it is 'none'"),
        (["--dsa-indexer-loss-coeff", "0.1"], "cannot train the indexer"),
    ],
)
def test_a_flag_that_disagrees_with_the_engine_is_one_sentence(flags: list[str], message: str) -> None:
    line = ["--preset", "glm-5", "--dsa-match-engine", "vllm", *FP8]
    with pytest.raises(CommandLineError, match=message):
        parse_args([*line, *flags])


def test_a_flag_that_agrees_with_the_engine_is_taken() -> None:
    line = ["--preset", "glm-5", *FP8]
    agreeing = parse_args([*line, "--dsa-match-engine", "vllm", "--dsa-indexer-rope-fp32"])
    assert agreeing.model == parse_args([*line, "--dsa-match-engine", "vllm"]).model
