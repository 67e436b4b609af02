"""Samples and micro-batches against a slow reading of the same rules."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.data.batch import Batch, SampleRules, collate

EOD = 7


class Window(NamedTuple):
    tokens: np.ndarray
    starts: np.ndarray


@st.composite
def windows(draw: st.DrawFn, length: int) -> Window:
    tokens = draw(st.lists(st.integers(0, EOD), min_size=length + 1, max_size=length + 1))
    starts = draw(st.lists(st.booleans(), min_size=length + 1, max_size=length + 1))
    return Window(np.array(tokens), np.array(starts))


def rules(eod: int | None = EOD, packed: bool = True, mask: bool = False) -> SampleRules:
    return SampleRules(eod=eod, vocab_size=8, reset_attention_mask=packed, eod_mask_loss=mask)


def document_of(window: Window, eod: int | None) -> list[int]:
    """The document that each token belongs to, counted from 0."""
    numbers: list[int] = []
    for i in range(len(window.tokens)):
        new = i > 0 and (bool(window.starts[i]) or (eod is not None and window.tokens[i - 1] == eod))
        numbers.append(numbers[-1] + new if numbers else 0)
    return numbers


@given(
    st.integers(1, 12).flatmap(lambda n: st.lists(windows(n), min_size=1, max_size=4)),
    st.sampled_from([EOD, None]),
    st.booleans(),
)
def test_packed_micro_batches_against_brute_force(batch: list[Window], eod: int | None, mask: bool) -> None:
    rule = rules(eod=eod, mask=mask and eod is not None)
    got = collate([rule.sample(window.tokens, window.starts, "data") for window in batch])
    tokens, labels, loss_mask, boundaries = [], [], [], [0]
    for window in batch:
        numbers = document_of(window, eod)
        for i in range(len(numbers) - 1):
            if i > 0 and numbers[i] != numbers[i - 1]:
                boundaries.append(len(tokens))
            tokens.append(window.tokens[i])
            labels.append(window.tokens[i + 1])
            own = numbers[i + 1] == numbers[i]
            loss_mask.append(float(own and not (rule.eod_mask_loss and window.tokens[i] == eod)))
        boundaries.append(len(tokens))
    assert got.packed_seq_params is not None
    assert got.packed_seq_params.offsets == tuple(boundaries)
    assert got.tokens.tolist() == [tokens] and got.labels.tolist() == [labels] and got.loss_mask.tolist() == [loss_mask]


@given(st.integers(1, 12).flatmap(lambda n: st.lists(windows(n), min_size=1, max_size=4)), st.booleans())
def test_plain_micro_batches_against_brute_force(batch: list[Window], mask: bool) -> None:
    rule = rules(packed=False, mask=mask)
    got = collate([rule.sample(window.tokens, window.starts, "data") for window in batch])
    assert got.packed_seq_params is None
    assert got.tokens.tolist() == [window.tokens[:-1].tolist() for window in batch]
    assert got.labels.tolist() == [window.tokens[1:].tolist() for window in batch]
    expected = [[float(not (mask and token == EOD)) for token in window.tokens[:-1]] for window in batch]
    assert got.loss_mask.tolist() == expected


def packed_batch() -> Batch:
    rule = rules()
    none = np.zeros(6, dtype=bool)
    rows = [np.array([1, EOD, 2, 3, 4, 5]), np.array([1, 2, 3, 4, EOD, 6])]
    return collate([rule.sample(row, none, "data") for row in rows])


def test_a_packed_micro_batch_by_hand() -> None:
    batch = packed_batch()
    assert batch.tokens.tolist() == [[1, EOD, 2, 3, 4, 1, 2, 3, 4, EOD]]
    assert batch.labels.tolist() == [[EOD, 2, 3, 4, 5, 2, 3, 4, EOD, 6]]
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 1, 1, 1, 1, 1, 0]]
    assert batch.packed_seq_params is not None
    assert batch.packed_seq_params.offsets == (0, 2, 5, 10)
    assert batch.packed_seq_params.cu_seqlens_q is not None
    assert batch.packed_seq_params.cu_seqlens_q.tolist() == [0, 2, 5, 10]
    assert batch.packed_seq_params.max_seqlen_q == 5
    assert [batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype] == [torch.int64, torch.int64, torch.float32]


def test_the_marks_of_a_window_stay_as_they_were() -> None:
    starts = np.zeros(4, dtype=bool)
    rules().sample(np.array([EOD, EOD, 1, 2]), starts, "data")
    assert not starts.any()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_micro_batch_moves_with_its_offsets(device: str) -> None:
    moved = packed_batch().to(device)
    assert moved.tokens.device.type == moved.labels.device.type == moved.loss_mask.device.type == device
    assert moved.packed_seq_params is not None and moved.packed_seq_params.cu_seqlens_q is not None
    assert moved.packed_seq_params.cu_seqlens_q.device.type == device
    assert moved.packed_seq_params.cu_seqlens_kv is not None
    assert moved.packed_seq_params.cu_seqlens_kv.device.type == device
    assert moved.packed_seq_params.offsets == (0, 2, 5, 10)


def test_a_plain_micro_batch_moves() -> None:
    sample = rules(packed=False).sample(np.arange(5), np.zeros(5, dtype=bool), "data")
    moved = collate([sample, sample]).to("meta")
    assert moved.tokens.shape == (2, 4) and moved.tokens.device.type == "meta" and moved.packed_seq_params is None
