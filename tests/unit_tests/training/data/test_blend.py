"""Blends: reading the flag, and a schedule that never strays from the weights by a sample."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.data.blend import BlendEntry, BlendOrder, blend_schedule, integer_shares, parse_blend
from tests.unit_tests.training.data.sentences import one_sentence

PARSED = {
    "none": ([], []),
    "one": (["A"], [("A", None)]),
    "one-that-is-a-number": (["2024"], [("2024", None)]),
    "no-weights": (["A", "B"], [("A", None), ("B", None)]),
    "weights": (["0.3", "A", "0.7", "B"], [("A", "3/10"), ("B", "7/10")]),
    "one-weight": (["5", "A"], [("A", "5")]),
    "exponent": (["1e-3", "A", "2", "B"], [("A", "1/1000"), ("B", "2")]),
    "prefix-that-is-a-number": (["1", "2023", "1", "B"], [("2023", "1"), ("B", "1")]),
}


@pytest.mark.parametrize("items,expected", PARSED.values(), ids=PARSED.keys())
def test_parse_blend(items: list[str], expected: list[tuple[str, str | None]]) -> None:
    entries = tuple(BlendEntry(prefix, None if weight is None else Fraction(weight)) for prefix, weight in expected)
    assert parse_blend("--data-path", items) == entries


@pytest.mark.parametrize(
    "items", [["0.3", "A", "B"], ["A", "0.3", "B", "0.7"], ["0.3", "A", "B", "C"], ["1", "A", "2"]]
)
def test_weights_and_prefixes_must_alternate(items: list[str]) -> None:
    with one_sentence(f"--train-data-path got {' '.join(items)!r}", "write --train-data-path A B or"):
        parse_blend("--train-data-path", items)


@pytest.mark.parametrize("weight", ["0", "-1", "0.0"])
def test_weights_are_positive(weight: str) -> None:
    with one_sentence("gives B the weight", "weights are positive"):
        parse_blend("--data-path", ["1", "A", weight, "B"])


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_no_weight_is_infinite(weight: str) -> None:
    with one_sentence("neither prefixes alone"):
        parse_blend("--data-path", ["1", "A", weight, "B"])


def test_integer_shares() -> None:
    assert integer_shares([Fraction("0.3"), Fraction("0.7")]) == (3, 7)
    assert integer_shares([600, 400]) == (3, 2)
    assert integer_shares([Fraction(1, 3), Fraction(1, 4), 1]) == (4, 3, 12)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 200))
def test_every_prefix_of_the_schedule_is_within_one_sample(shares: list[int], size: int) -> None:
    schedule = blend_schedule(shares, size)
    assert len(schedule) == min(size, sum(shares))
    counts = np.cumsum(schedule[:, None] == np.arange(len(shares)), axis=0)
    ideal = np.outer(np.arange(1, len(schedule) + 1), shares) / sum(shares)
    assert np.all(np.abs(counts - ideal) < 1)
    if size >= sum(shares):
        assert counts[-1].tolist() == shares


def test_many_small_datasets_beside_a_large_one() -> None:
    """Where ordering by the samples' ideal middles errs by a quarter of the small datasets' number."""
    shares = [100] + [1] * 100
    schedule = blend_schedule(shares, 200)
    large = np.cumsum(schedule == 0)
    assert np.all(np.abs(large - np.arange(1, 201) / 2) < 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 80))
def test_each_dataset_is_read_in_order_without_gaps(shares: list[int], size: int) -> None:
    order, seen = BlendOrder(shares, size), Counter[int]()
    for index in range(size):
        dataset, place = order[index]
        assert place == seen[dataset]
        seen[dataset] += 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 40))
def test_a_longer_run_keeps_the_order(shares: list[int], size: int, more: int) -> None:
    short, long = BlendOrder(shares, size), BlendOrder(shares, size + more)
    assert [short[i] for i in range(size)] == [long[i] for i in range(size)]
