"""IndexShare schedules: Hugging Face's list of words against Megatron's frequency and offset.

Hugging Face names every layer "full" (it selects keys) or "shared" (it reuses the nearest earlier selection). Megatron
has one rule of a frequency and an offset (``DSAConfig``'s ``selects``). A list that no two numbers reproduce is called
irregular; a per-layer list can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.transformer.experimental_attention_variant.dsa.config import selects
from megatron.core.transformer.transformer_config import MLATransformerConfig

_WORDS = {"full": True, "shared": False, "F": True, "S": False}


def schedule_of(config: MLATransformerConfig) -> list[bool]:
    """A model's schedule, one entry a layer: True where the layer selects its own keys."""
    dsa = config.dsa_config()
    return [dsa.computes_topk(number) for number in range(1, config.num_layers + 1)]


def read_schedule(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """The schedule of a config.json, one entry a layer: True where the layer selects its own keys.

    As in transformers, ``indexer_types`` wins over ``index_topk_pattern``, and that over ``index_topk_freq`` with
    ``index_skip_topk_offset`` (whose default there is 2).

    Raises:
        ValueError: an unknown word, a wrong length, or a first layer that has nothing to reuse.
    """
    name = next((key for key in ("indexer_types", "index_topk_pattern") if hf.get(key) is not None), None)
    if name is not None:
        schedule = _read_words(name, hf[name], num_layers)
    else:
        name = "index_topk_freq"
        freq = max(int(hf.get("index_topk_freq") or 1), 1)
        offset = hf.get("index_skip_topk_offset")
        offset = 2 if offset is None else int(offset)
        schedule = [max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers)]
    if schedule and not schedule[0]:
        raise ValueError(
            f"{name} makes the first layer reuse selected keys, but there is no earlier layer to reuse them from: "
            "make the first layer full."
        )
    return schedule


def _read_words(name: str, words: Sequence[str], num_layers: int) -> list[bool]:
    unknown = sorted({str(word) for word in words} - set(_WORDS))
    if unknown or len(words) != num_layers:
        raise ValueError(
            f"{name} has {len(words)} entries for {num_layers} layers and unknown words {unknown}: give one entry a "
            'layer, each "full" or "shared".'
        )
    return [_WORDS[word] for word in words]


def to_frequency(schedule: Sequence[bool]) -> tuple[int, int] | None:
    """(dsa_indexer_topk_freq, dsa_indexer_skip_topk_offset) of a schedule, or None if it is irregular."""
    num_layers = len(schedule)
    if all(schedule):
        return 1, 1
    first_shared = schedule.index(False)
    next_full = next((layer for layer in range(first_shared, num_layers) if schedule[layer]), num_layers)
    freq = next_full + 1 - first_shared
    regular = all(selects(layer + 1, freq, first_shared) == own for layer, own in enumerate(schedule))
    return (freq, first_shared) if regular else None


def to_words(schedule: Sequence[bool]) -> list[str]:
    """Hugging Face's ``indexer_types`` of a schedule."""
    return ["full" if selects else "shared" for selects in schedule]
