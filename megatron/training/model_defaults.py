"""Where the values of the model's flags come from, if not from the command line: a preset, a Hugging Face checkpoint,
Megatron's own defaults, or the inference engine that is to be matched.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron.core.models.gpt.presets import PRESETS, get_preset
from megatron.core.transformer.experimental_attention_variant.dsa.engines import apply_engine, describe_engine
from megatron.core.transformer.transformer_config import MLATransformerConfig


def model_defaults(given: Mapping[str, Sequence[str]]) -> MLATransformerConfig | None:
    """The model that --preset or --load-hf names; None where neither is given.

    Args:
        given: flags by name with their values, as they were typed.

    Raises:
        ValueError: one sentence; an unknown preset, both flags, or a checkpoint whose config.json cannot be expressed.
    """
    preset, folder = (values[-1] if (values := given.get(name)) else None for name in ("preset", "load-hf"))
    if preset is not None and folder is not None:
        raise ValueError(f"--preset {preset} and --load-hf {folder} both describe the model: give one of them.")
    if folder is not None:
        return _hugging_face(folder, given.get("dsa-indexer-topk-freq", ()))
    if preset is None:
        return None
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(PRESETS)}."
        raise ValueError(f"--preset {preset} is unknown: {advice}")
    return get_preset(preset)


def match_engine(fields: Mapping[str, Any], given: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The model's fields as --dsa-match-engine wants them, and a sentence about what it changed.

    Args:
        fields: values of all flags of the model, given or default.
        given: names of the flags that were typed.

    Raises:
        ValueError: a flag that was typed disagrees, or the engine does not run the model.
    """
    engine = fields["dsa_match_engine"]
    if engine is None:
        return dict(fields), ()
    options = apply_engine(engine, fields, {name.removeprefix("no-").replace("-", "_") for name in given})
    return {**fields, **options}, (describe_engine(engine, options, fields),)


def _hugging_face(folder: str, schedule: Sequence[str]) -> MLATransformerConfig:
    """An explicit IndexShare list takes part in reading, because an irregular one cannot be read without it."""
    from megatron.core.models.hf import config_from_hf, read_config  # only this flag needs it

    listed = len(schedule) > 1 and all(item.isdigit() for item in schedule)
    overrides = {"dsa_indexer_topk_freq": [int(item) for item in schedule]} if listed else {}
    return config_from_hf(read_config(folder), **overrides)
