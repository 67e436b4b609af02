"""Mock data: reproducible, and such that a token says which one follows."""

import numpy as np
import pytest

from megatron.training.data.batch import SampleRules
from megatron.training.data.mock import MockStream


def rules(eod: int | None = 10, vocab_size: int = 11) -> SampleRules:
    return SampleRules(eod, vocab_size, reset_attention_mask=True, eod_mask_loss=False)


def test_a_token_says_which_one_follows() -> None:
    stream = MockStream(0, 40, 1, rules())
    follower: dict[int, int] = {}
    for i in range(50):
        sample = stream.sample(i)
        for token, label, counts in zip(sample.tokens, sample.labels, sample.loss_mask, strict=True):
            if counts and label != 10:
                assert token != 10 and follower.setdefault(int(token), int(label)) == label
    assert sorted(follower) == sorted(follower.values()) == list(range(10))


def test_documents_end_with_eod_and_have_many_lengths() -> None:
    stream, lengths = MockStream(0, 64, 1, rules()), set()
    for i in range(50):
        sample = stream.sample(i)
        assert sample.starts is not None
        bounds = sample.starts.tolist()
        assert (sample.tokens[np.array(bounds[1:], dtype=int) - 1] == 10).all()
        lengths |= set(np.diff(bounds).tolist())
    assert len(lengths) > 10


def test_without_eod_documents_just_begin() -> None:
    sample = MockStream(0, 64, 1, rules(eod=None)).sample(0)
    assert sample.starts is not None and len(sample.starts) > 1
    assert set(sample.tokens.tolist()) <= set(range(11))


@pytest.mark.parametrize("seq_length", [1, 2, 15, 16, 33])
def test_every_length(seq_length: int) -> None:
    for i in range(20):
        assert MockStream(0, seq_length, 1, rules()).sample(i).tokens.shape == (seq_length,)


def test_samples_repeat_and_differ_by_seed_split_and_number() -> None:
    def text(split: int, seed: int, index: int) -> tuple[int, ...]:
        return tuple(MockStream(split, 16, seed, rules()).sample(index).tokens.tolist())

    assert text(0, 1, 5) == text(0, 1, 5)
    assert len({text(0, 1, 5), text(1, 1, 5), text(0, 2, 5), text(0, 1, 6), text(0, 1, 5 + 2**32)}) == 5
