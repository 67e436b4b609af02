"""IndexShare schedules against transformers' GlmMoeDsaConfig, and both directions of the mapping."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig

from megatron.core.models.hf.index_share import read_schedule, to_frequency, to_words
from megatron.core.transformer.experimental_attention_variant.dsa.config import selects


def selecting_layers(freq: int, offset: int, layers: int) -> list[bool]:
    return [selects(number, freq, offset) for number in range(1, layers + 1)]


RULES = list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 5), (1, 2, 6, 13)))


@pytest.mark.parametrize(("freq", "offset", "layers"), RULES)
def test_frequency_and_offset_mean_the_same_in_both_spellings(freq: int, offset: int, layers: int) -> None:
    theirs = GlmMoeDsaConfig(num_hidden_layers=layers, index_topk_freq=freq, index_skip_topk_offset=offset)
    schedule = read_schedule({"index_topk_freq": freq, "index_skip_topk_offset": offset}, layers)
    assert to_words(schedule) == theirs.indexer_types
    assert schedule == selecting_layers(freq, offset, layers)
    rule = to_frequency(schedule)
    assert rule is not None
    assert selecting_layers(*rule, layers) == schedule


def test_list_wins_over_pattern_and_pattern_over_frequency() -> None:
    keys = {"indexer_types": ["full", "shared", "full"], "index_topk_pattern": "FFS", "index_topk_freq": 3}
    assert read_schedule(keys, 3) == [True, False, True]
    del keys["indexer_types"]
    assert read_schedule(keys, 3) == [True, True, False]
    assert read_schedule(keys | {"index_topk_pattern": ["full", "shared", "shared"]}, 3) == [True, False, False]
    del keys["index_topk_pattern"]
    assert to_words(read_schedule(keys, 3)) == GlmMoeDsaConfig(num_hidden_layers=3, **keys).indexer_types
    assert read_schedule({}, 3) == [True, True, True]


def test_glm_5_2_has_21_selecting_layers() -> None:
    schedule = read_schedule({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 78)
    assert (sum(schedule), len(schedule)) == (21, 78)
    assert to_frequency(schedule) == (4, 3)


@given(st.lists(st.booleans(), min_size=0, max_size=9))
def test_frequency_reproduces_a_schedule_or_there_is_none(tail: list[bool]) -> None:
    schedule = [True, *tail]
    rules = itertools.product(range(1, len(schedule) + 2), range(1, len(schedule) + 1))
    exists = any(selecting_layers(freq, offset, len(schedule)) == schedule for freq, offset in rules)
    rule = to_frequency(schedule)
    assert (rule is not None) == exists
    assert rule is None or selecting_layers(*rule, len(schedule)) == schedule


REFUSED = {
    "indexer_types makes the first layer reuse": {"indexer_types": ["shared", "full"]},
    "index_topk_freq makes the first layer reuse": {"index_topk_freq": 2, "index_skip_topk_offset": 0},
    "has 3 entries for 2 layers": {"indexer_types": ["full"] * 3},
    "unknown words \\['half'\\]": {"indexer_types": ["full", "half"]},
    "index_topk_pattern has 2 entries .* unknown words \\['X'\\]": {"index_topk_pattern": "FX"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_impossible_schedules_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_schedule(REFUSED[message], 2)
