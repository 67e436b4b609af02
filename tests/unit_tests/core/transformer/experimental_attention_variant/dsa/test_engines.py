"""The engines' options: the table in code, the page, the configuration's gate, and what disagrees."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron.core.models.gpt.presets import get_preset
from megatron.core.transformer.experimental_attention_variant.dsa.engines import (
    ENGINES,
    apply_engine,
    describe_engine,
    engine_options,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.unit_tests.tree_rules import ROOT

MODELS = {"GLM": "glm-5", "DeepSeek-V3.2": "deepseek-v3.2"}
SHORT = ("rope_fp32", "rope_table_dtype", "rotate_activation", "fp8_scale_format")
SERVED = [(engine, model) for engine in ENGINES for model in MODELS if (engine, model) != ("deepseek", "GLM")]


def fields(model: str, **changes: Any) -> dict[str, Any]:
    """A model that may score in FP8."""
    fp8 = {"dsa_kernel_backend": "cudnn", "dsa_indexer_loss_coeff": 0.0}
    return vars(replace(get_preset(MODELS[model]), **{**fp8, **changes}))


@pytest.mark.parametrize(("engine", "model"), SERVED)
def test_the_page_says_what_the_code_does(engine: str, model: str) -> None:
    page = (ROOT / "docs" / "rl_parity.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {engine} \| {re.escape(model)} \| (.*) \|$", page, flags=re.MULTILINE)
    options = engine_options(engine, fields(model))
    assert rows == [" | ".join(str(options[f"dsa_indexer_{name}"]) for name in SHORT)]


def test_the_page_has_no_other_rows() -> None:
    page = (ROOT / "docs" / "rl_parity.md").read_text(encoding="utf-8")
    table = page.split("| engine | model |")[1].split("\n\n")[0]
    assert len(table.splitlines()) - 2 == len(SERVED)


def test_the_page_says_what_was_not_read() -> None:
    page = (ROOT / "docs" / "rl_parity.md").read_text(encoding="utf-8")
    sources = re.findall(r"^\| SGLang \| .*$", page, flags=re.MULTILINE)
    assert len(sources) == 2
    assert all(re.search("default epsilon that its key norm takes,? was not read", row) for row in sources)


def test_the_page_counts_rows_as_the_measurement_did() -> None:
    """FP8 scores against DeepGEMM's: rows with another set, and the distance of the keys that differ."""
    page = (ROOT / "docs" / "rl_parity.md").read_text(encoding="utf-8").replace("\n ", "")
    said = re.search(r"in (\d) \(32 heads\) and in (\d) \(64 heads\) of the last 4,096 rows of 65,536", page)
    at_most = re.search(r"in at most (\d) of 4,096 rows .* at most ([\d.]+) ulp apart", page)
    assert said is not None and at_most is not None
    results = ROOT / "tests" / "performance_tests" / "results" / "2026-11-30-h200-fp8.md"
    table = re.findall(
        r"^\| (.*) \| (\d+) \| (\d+) \| ([\d.]+) ulp \|$", results.read_text(encoding="utf-8"), re.MULTILINE
    )
    other_sets = {case: other for case, _, other, _ in table}
    assert said.groups() == tuple(other_sets[f"last 4096 rows of 65536, H{heads}"] for heads in (32, 64))
    assert at_most.groups() == (max(other_sets.values()), max(gap for *_, gap in table))


@pytest.mark.parametrize(("engine", "model"), SERVED)
def test_a_matched_configuration_builds(engine: str, model: str) -> None:
    values = fields(model)
    config = MLATransformerConfig(**{**values, **apply_engine(engine, values), "dsa_match_engine": engine})
    assert config.dsa_indexer_scoring_precision == "fp8" and config.dsa_indexer_k_norm_fp32
    assert config.dsa_indexer_rope_interleaved == (model == "GLM")
    assert config.attention_latent_norm_epsilon == (1e-5 if model == "GLM" else 1e-6)
    assert config.dsa_config().fp8_scale_format == config.dsa_indexer_fp8_scale_format


@pytest.mark.parametrize(("engine", "model"), SERVED)
def test_a_configuration_that_names_an_engine_must_agree_with_it(engine: str, model: str) -> None:
    values = fields(model)
    options = apply_engine(engine, values)
    others = {
        "dsa_indexer_scoring_precision": "bf16",
        "dsa_indexer_fp8_scale_format": "fp32_k" if options["dsa_indexer_fp8_scale_format"] != "fp32_k" else "fp32",
        "dsa_indexer_rope_table_dtype": "model" if options["dsa_indexer_rope_table_dtype"] == "fp32" else "fp32",
        "dsa_indexer_k_norm_epsilon": 1e-3,
        "attention_latent_norm_epsilon": 1e-3,
    }
    for name, value in options.items():
        if name == "dsa_indexer_rope_interleaved":
            continue  # that makes it the other model
        other = others.get(name, not value)
        with pytest.raises(ValueError, match=f"dsa_match_engine='{engine}' means {name}="):
            MLATransformerConfig(**{**values, **options, "dsa_match_engine": engine, name: other})


def test_only_given_options_can_disagree() -> None:
    values = fields("GLM", dsa_indexer_rope_fp32=False)
    assert apply_engine("vllm", values)["dsa_indexer_rope_fp32"] is True
    assert apply_engine("vllm", values, explicit=["dsa_indexer_n_heads"])["dsa_indexer_rope_fp32"] is True
    with pytest.raises(ValueError, match="means dsa_indexer_rope_fp32=True, but it is False: drop the option"):
        apply_engine("vllm", values, explicit=["dsa_indexer_rope_fp32"])
    agreeing = fields("GLM", dsa_indexer_rope_fp32=True)
    assert apply_engine("vllm", agreeing, explicit=["dsa_indexer_rope_fp32"]) == apply_engine("vllm", values)


def test_an_unset_epsilon_is_the_block_norms() -> None:
    values = fields("GLM", attention_latent_norm_epsilon=None)
    explicit = ["attention_latent_norm_epsilon"]
    assert apply_engine("vllm", values, explicit)["attention_latent_norm_epsilon"] == 1e-5


def test_vllms_tables_follow_the_rope_type() -> None:
    for model in MODELS:
        for rope_type, table in (("yarn", "fp32"), ("rope", "model")):
            values = fields(model, rope_type=rope_type)
            assert engine_options("vllm", values)["dsa_indexer_rope_table_dtype"] == table


def test_unknown_engines_and_models_are_refused() -> None:
    with pytest.raises(ValueError, match="dsa_match_engine='trt' is unknown: use one of vllm, sglang"):
        engine_options("trt", fields("GLM"))
    with pytest.raises(ValueError, match="runs DeepSeek-V3.2 alone"):
        engine_options("deepseek", fields("GLM"))
    with pytest.raises(ValueError, match="experimental_attention_variant is None: use 'dsa'"):
        engine_options("vllm", {**fields("GLM"), "experimental_attention_variant": None})


def test_the_sentence_names_what_changed() -> None:
    values = fields("DeepSeek-V3.2")
    options = apply_engine("deepseek", values)
    sentence = describe_engine("deepseek", options, values)
    assert sentence.startswith("Matching deepseek: dsa_indexer_scoring_precision 'bf16' -> 'fp8', ")
    assert "dsa_indexer_rotate_activation False -> True" in sentence and "rope_fp32" not in sentence
    assert "attention_latent_norm_epsilon" not in sentence
    again = describe_engine("deepseek", options, {**values, **options})
    assert again == "Matching deepseek: every option agrees already."
