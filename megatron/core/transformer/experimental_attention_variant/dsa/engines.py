"""Which options make the trainer select the keys that an inference engine selects.

An engine's indexer rounds at places of its own: after the key norm or not, after RoPE or not, in the tables, in the
scales. Those choices differ by engine and, within SGLang, by model. Each entry of ``_POLICIES`` is one code path, as
read in the engine's source; ``docs/rl_parity.md`` has the table with its sources and what it can promise.

The models are told apart by how the indexer pairs rotary channels, which is the checkpoint's business and not the
engine's: neighbours in GLM, halves in DeepSeek-V3.2.

Left out: what no option of this package can say (head-weight projections in FP32, the floor of LMDeploy's scales, head
weights rounded to BF16); the page says how much each matters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

ENGINES = ("vllm", "sglang", "lmdeploy", "deepseek")

_GLM, _DEEPSEEK = True, False  # dsa_indexer_rope_interleaved

# (engine, rotary pairing) -> rope_fp32, rope_table_dtype, rotate_activation, fp8_scale_format.
# vLLM's tables are FP32 with YaRN alone: "yarn" stands for that.
_POLICIES: dict[tuple[str, bool], tuple[bool, str, bool, str]] = {
    ("vllm", _GLM): (True, "yarn", False, "ue8m0"),
    ("vllm", _DEEPSEEK): (True, "yarn", False, "ue8m0"),
    ("sglang", _GLM): (True, "fp32", False, "fp32"),
    ("sglang", _DEEPSEEK): (False, "fp32", True, "fp32_k"),
    ("lmdeploy", _GLM): (False, "model", False, "ue8m0"),
    ("lmdeploy", _DEEPSEEK): (False, "model", False, "ue8m0"),
    ("deepseek", _DEEPSEEK): (False, "fp32", True, "ue8m0"),
}


def engine_options(engine: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``engine`` needs, by ``MLATransformerConfig``'s field names.

    Args:
        engine: one of ``ENGINES``.
        values: the model's fields; its variant, rotary pairing, rope type and block norm epsilon are read.

    Raises:
        ValueError: the engine is unknown, or does not run the model.
    """
    if engine not in ENGINES:
        raise ValueError(f"dsa_match_engine={engine!r} is unknown: use one of {', '.join(ENGINES)}.")
    if values["experimental_attention_variant"] != "dsa":
        raise ValueError(
            f"dsa_match_engine={engine!r} matches a DSA indexer, but experimental_attention_variant is "
            f"{values['experimental_attention_variant']!r}: use 'dsa'."
        )
    pairs_neighbours = bool(values["dsa_indexer_rope_interleaved"])
    if (engine, pairs_neighbours) not in _POLICIES:
        raise ValueError(
            f"dsa_match_engine={engine!r} is DeepSeek's own code, which runs DeepSeek-V3.2 alone, but "
            "dsa_indexer_rope_interleaved=True makes this a GLM model: name the engine that serves it."
        )
    rope_fp32, tables, rotate, scale_format = _POLICIES[engine, pairs_neighbours]
    if tables == "yarn":
        tables = "fp32" if values["rope_type"] == "yarn" else "model"
    return {
        "dsa_indexer_scoring_precision": "fp8",
        "dsa_indexer_fp8_scale_format": scale_format,
        "dsa_indexer_rope_fp32": rope_fp32,
        "dsa_indexer_rope_table_dtype": tables,
        "dsa_indexer_rope_interleaved": pairs_neighbours,
        "dsa_indexer_rotate_activation": rotate,
        "dsa_indexer_k_norm_epsilon": 1e-6,  # assumed for SGLang, whose class default was not read
        "dsa_indexer_k_norm_fp32": True,
        "attention_latent_norm_epsilon": values["layernorm_epsilon"],
    }


def apply_engine(engine: str, values: Mapping[str, Any], explicit: Collection[str] = ()) -> dict[str, Any]:
    """``engine_options``, after a look at the options that the user gave beside the engine.

    Args:
        engine: one of ``ENGINES``.
        values: the model's fields, given or default.
        explicit: names of fields that were given.

    Raises:
        ValueError: a given option disagrees with the engine, or ``engine_options`` raises.
    """
    options = engine_options(engine, values)
    for name, value in options.items():
        if name in explicit and _effective(name, values) != value:
            raise ValueError(
                f"dsa_match_engine={engine!r} means {name}={value!r}, but it is {values[name]!r}: drop the option, or "
                "drop dsa_match_engine and set each option yourself."
            )
    return options


def describe_engine(engine: str, options: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """A sentence about what matching changed in ``values``."""
    before = {name: _effective(name, values) for name in options}
    changed = [f"{name} {before[name]!r} -> {value!r}" for name, value in options.items() if before[name] != value]
    return f"Matching {engine}: {', '.join(changed) or 'every option agrees already'}."


def _effective(name: str, values: Mapping[str, Any]) -> Any:
    """A field's value; an epsilon that is unset is the block norms'."""
    return values["layernorm_epsilon"] if name.endswith("_epsilon") and values[name] is None else values[name]
