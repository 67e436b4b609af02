"""What kind of value each key of a config.json holds; anything else is refused before it is used.

Keys that nothing here reads are not looked at, and null means absent: who needs the value says so.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


_INTEGER = "an integer", _is_integer
_NUMBER = "a finite number", _is_number
_SWITCH = "true or false", lambda value: isinstance(value, bool)
_OBJECT = "an object in braces", lambda value: isinstance(value, Mapping)
_TEXT = "a text", lambda value: isinstance(value, str)
_TEXTS = "a list of texts", _is_texts
_PATTERN = "a text or a list of texts", lambda value: isinstance(value, str) or _is_texts(value)

_KEYS: list[tuple[tuple[str, Callable[[Any], bool]], str]] = [
    (
        _INTEGER,
        "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
        "max_position_embeddings q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_n_heads "
        "index_head_dim index_topk n_routed_experts num_local_experts num_experts n_shared_experts "
        "moe_intermediate_size num_experts_per_tok n_group topk_group first_k_dense_replace index_topk_freq "
        "index_skip_topk_offset num_nextn_predict_layers",
    ),
    (_NUMBER, "rms_norm_eps initializer_range routed_scaling_factor rope_theta"),
    (_SWITCH, "tie_word_embeddings norm_topk_prob"),
    (_OBJECT, "rope_parameters rope_scaling quantization_config"),
    (_TEXTS, "mlp_layer_types layer_types"),
    (_PATTERN, "indexer_types index_topk_pattern"),
]
_ROPE_KEYS: list[tuple[tuple[str, Callable[[Any], bool]], str]] = [
    (
        _NUMBER,
        "rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim attention_factor",
    ),
    (_TEXT, "rope_type type"),
]
# Null would silently mean false here, whatever the class's default is.
_NEVER_NULL = ("tie_word_embeddings", "norm_topk_prob")


def check_types(hf: Mapping[str, Any]) -> None:
    """Check the values of a config.json that this package reads.

    Raises:
        ValueError: one sentence naming the first wrong key, its value and what is expected.
    """
    for name in _NEVER_NULL:
        if name in hf and hf[name] is None:
            raise ValueError(f"{name} is null in config.json, but it must be true or false: give its value.")
    _check(hf, _KEYS, "")
    for name in ("rope_parameters", "rope_scaling"):
        _check(hf.get(name) or {}, _ROPE_KEYS, f"{name}.")


def _check(values: Mapping[str, Any], keys: list[tuple[tuple[str, Callable[[Any], bool]], str]], prefix: str) -> None:
    for (expected, fits), names in keys:
        for name in names.split():
            value = values.get(name)
            if value is not None and not fits(value):
                raise ValueError(
                    f"{prefix}{name} is {reprlib.repr(value)} in config.json, but it must be {expected}: correct it."
                )
