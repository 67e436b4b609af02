"""Synthetic documents to learn from, for trying things out without data.

All documents walk the same circle through the vocabulary, each from its own starting point: a token says which one
follows, so a model that learns at all drives the loss down within few steps. Documents have random lengths and, where
the tokenizer has an end-of-document token, end with it. Sample i is made on the spot from the seed, the split and i.
"""

from __future__ import annotations

import numpy as np

from megatron.training.data.batch import Sample, SampleRules


class MockStream:
    """Endless synthetic samples; `split` keeps training, validation and test samples apart."""

    def __init__(self, split: int, seq_length: int, seed: int, rules: SampleRules) -> None:
        self._split, self._seq_length, self._seed, self._rules = split, seq_length, seed, rules
        ids = np.arange(rules.vocab_size)
        if rules.eod is not None:
            ids = ids[ids != rules.eod]
        self._circle = np.random.RandomState([seed]).permutation(ids)

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0 without end."""
        count = self._seq_length + 1
        random = np.random.RandomState([self._seed, self._split, index % 2**32, index >> 32])
        shortest, longest = 1 + count // 16, 2 + count // 2
        # As many documents as fill the window even if all are of the shortest length.
        lengths = random.randint(shortest, longest, size=-(-count // shortest))
        first_tokens = random.randint(len(self._circle), size=len(lengths))
        ends = np.cumsum(lengths)
        document = np.searchsorted(ends, np.arange(count), side="right")
        within = np.arange(count) - (ends - lengths)[document]
        tokens = self._circle[(first_tokens[document] + within) % len(self._circle)]
        if self._rules.eod is not None:
            tokens[np.isin(np.arange(count), ends - 1)] = self._rules.eod
        return self._rules.sample(tokens, within == 0, "the mock data")
