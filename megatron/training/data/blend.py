"""Blends: which of several datasets each sample comes from.

`--data-path 0.3 A 0.7 B` names prefixes with weights, `--data-path A B` without: then each weighs what it holds, so
that all of them are read once in the same time.

The order is a schedule and not a draw, so every prefix of the run holds each dataset's share to within one sample.
Drawing the dataset that lags most is the usual rule, but with many datasets it errs by more than one. Here every
dataset's k-th sample gets the window of slots in which placing it keeps that dataset within one sample of its share,
and the slot goes to the open window that closes first; on one processor this order meets every deadline (it is the
proportionate-fair scheduling of Baruah, Cohen, Plaxton and Varvel, 1996).

Weights are exact fractions, so the schedule repeats after as many samples as their common denominator. Sample i is
therefore found without knowing how long the run is: a run that is prolonged keeps the order it began with.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

import numpy as np


class BlendEntry(NamedTuple):
    """One dataset of a blend: its path prefix, and its weight where the user gave one."""

    prefix: str
    weight: Fraction | None


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


def parse_blend(flag: str, items: Sequence[str]) -> tuple[BlendEntry, ...]:
    """Read the value of a data-path flag: one prefix, several prefixes, or weights each followed by its prefix.

    Raises:
        ValueError: weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = [_number(item) for item in items]
    if len(items) == 1 or not any(number is not None for number in numbers):
        return tuple(BlendEntry(item, None) for item in items)
    weights = numbers[::2]
    if len(items) % 2 or any(weight is None for weight in weights):
        raise ValueError(
            f"{flag} got {' '.join(items)!r}, which is neither prefixes alone nor a weight before every prefix: write "
            f"{flag} A B or {flag} 0.3 A 0.7 B."
        )
    entries = tuple(BlendEntry(prefix, weight) for prefix, weight in zip(items[1::2], weights, strict=True))
    for entry in entries:
        if entry.weight is None or entry.weight <= 0:
            raise ValueError(
                f"{flag} gives {entry.prefix} the weight {entry.weight}, but weights are positive: leave out a "
                "dataset that is not to be read."
            )
    return entries


def integer_shares(weights: Sequence[Fraction | int]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportion of `weights`; their sum is the length of the schedule's cycle."""
    fractions = [Fraction(weight) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * denominator) for fraction in fractions]
    divisor = gcd(*whole)
    return tuple(number // divisor for number in whole)


def blend_schedule(shares: Sequence[int], size: int) -> np.ndarray:
    """Dataset of each slot, int32, for one cycle of `sum(shares)` slots or `size` slots, whichever is shorter.

    After any number of slots n, dataset d was chosen within one of `n * shares[d] / sum(shares)` times.
    """
    cycle = sum(shares)
    length = min(cycle, size)
    schedule = np.zeros(length, dtype=np.int32)
    # A window is (first slot, slot before which it must be placed, dataset, k): shut until its first slot, then open.
    shut = [(0, -(-cycle // share), dataset, 1) for dataset, share in enumerate(shares)]
    opened: list[tuple[int, int, int]] = []
    heapq.heapify(shut)
    for slot in range(length):
        while shut and shut[0][0] <= slot:
            _, deadline, dataset, k = heapq.heappop(shut)
            heapq.heappush(opened, (deadline, dataset, k))
        deadline, dataset, k = heapq.heappop(opened)
        assert deadline > slot, "a dataset fell more than one sample behind its share"
        schedule[slot] = dataset
        share = shares[dataset]
        heapq.heappush(shut, (k * cycle // share, -(-(k + 1) * cycle // share), dataset, k + 1))
    return schedule


class BlendOrder:
    """Sample number -> (dataset, sample number within that dataset), for datasets in the proportion of `shares`."""

    def __init__(self, shares: Sequence[int], size: int) -> None:
        self.shares = tuple(shares)
        self.cycle = sum(shares)
        self.dataset_of_slot = blend_schedule(shares, size)
        self.rank_of_slot = np.empty(len(self.dataset_of_slot), dtype=np.int64)
        for dataset in range(len(shares)):
            slots = np.flatnonzero(self.dataset_of_slot == dataset)
            self.rank_of_slot[slots] = np.arange(len(slots))

    def __getitem__(self, index: int) -> tuple[int, int]:
        turn, slot = divmod(index, self.cycle)
        dataset = int(self.dataset_of_slot[slot])
        return dataset, turn * self.shares[dataset] + int(self.rank_of_slot[slot])
