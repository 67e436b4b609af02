"""Rotary embedding settings: Hugging Face's ``rope_parameters`` against the config's flat YaRN fields.

Hugging Face derives the factor ``t`` on cos and sin in three ways (given as ``attention_factor``; from ``mscale`` and
``mscale_all_dim`` when both are set; else from the context factor alone), while the softmax scale reads
``mscale_all_dim`` only. The config has one formula, ``t = g(mscale) / g(mscale_all_dim)`` with
``g(m) = 0.1 * m * ln(factor) + 1``, so the other ways are solved for ``mscale``. Plain RoPE sets ``mscale_all_dim`` to
0, because Megatron's softmax scale reads it for both rope types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.models.common.embeddings.rope_utils import yarn_magnitude

_PLAIN = {"rope_type": "rope", "mscale": 1.0, "mscale_all_dim": 0.0}


def read_rope(hf: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Config fields for the rotary settings of a config.json (either spelling: rope_parameters, or rope_scaling).

    Raises:
        ValueError: a rope type other than default and yarn, ``truncate: false``, a partial rotary factor, or an
            attention factor that no mscale reproduces.
    """
    given = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    theta = given.get("rope_theta", hf.get("rope_theta"))
    theta = 10000.0 if theta is None else float(theta)
    kind = given.get("rope_type", given.get("type")) or "default"
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported: this package has plain RoPE (default) and yarn.")
    if given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor is set, but rotary heads are always rotated whole here: set it to 1.")
    if kind == "default":
        return {**_PLAIN, "rotary_base": theta}
    if given.get("truncate", True) is not True:
        raise ValueError(
            "YaRN with truncate: false keeps fractional ends of the ramp, which no config field expresses: only "
            "truncate: true (the default) is supported."
        )
    return {"rope_type": "yarn", "rotary_base": theta, **_read_yarn(given, max_position_embeddings)}


def _read_yarn(given: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings")
    if not original:
        raise ValueError("YaRN needs original_max_position_embeddings in rope_parameters: add the original length.")
    factor = given.get("factor")
    factor = max_position_embeddings / original if factor is None else float(factor)
    mscale, mscale_all_dim = _read_mscale(given, factor)
    return {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": int(original),
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _read_mscale(given: Mapping[str, Any], factor: float) -> tuple[float, float]:
    mscale, all_dim, table_factor = (given.get(key) for key in ("mscale", "mscale_all_dim", "attention_factor"))
    if table_factor is None:
        if mscale and all_dim:
            return float(mscale), float(all_dim)
        if not all_dim:
            return 1.0, 0.0
        table_factor = yarn_magnitude(factor, 1.0)
    all_dim = float(all_dim or 0.0)
    if factor > 1:
        return (table_factor * yarn_magnitude(factor, all_dim) - 1) / (0.1 * math.log(factor)), all_dim
    if table_factor != 1:
        raise ValueError(
            f"YaRN with attention_factor={table_factor} and factor={factor} scales cos and sin without extending the "
            "context, which no config field expresses: remove attention_factor."
        )
    return 1.0, all_dim


def write_rope(config: Any) -> dict[str, Any]:
    """``rope_parameters`` for a config (MLATransformerConfig); the inverse of ``read_rope``."""
    if config.rope_type == "rope":
        return {"rope_type": "default", "rope_theta": config.rotary_base}
    factor, mscale, all_dim = config.rotary_scaling_factor, config.mscale, config.mscale_all_dim
    parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rotary_base,
        "factor": factor,
        "original_max_position_embeddings": config.original_max_position_embeddings,
        "beta_fast": config.beta_fast,
        "beta_slow": config.beta_slow,
    }
    if all_dim:
        parameters["mscale_all_dim"] = all_dim
    if mscale and all_dim:
        return parameters | {"mscale": mscale}
    if yarn_magnitude(factor, mscale) == yarn_magnitude(factor, 1.0) and not all_dim:
        return parameters
    return parameters | {"attention_factor": yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)}
