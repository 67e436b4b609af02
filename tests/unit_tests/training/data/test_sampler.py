"""The order of micro-batches: the same from any position, for any number of ranks and of reader processes."""

import os
import signal
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.data.batch import Batch
from megatron.training.data.build import SampleDataset, build_datasets
from megatron.training.data.config import DataConfig
from megatron.training.data.mock import MockStream
from megatron.training.data.sampler import batches
from megatron.training.tokenizer import NullTokenizer
from tests.unit_tests.training.data.corpora import PACKED, RULES, numbered_documents, write_corpus
from tests.unit_tests.training.data.sentences import one_sentence


def mock(size: int, packed: bool = False) -> SampleDataset:
    return SampleDataset(MockStream(0, 6, 1, PACKED if packed else RULES), size)


def rows(micro_batches: Iterable[Batch], seq_length: int = 6) -> list[list[int]]:
    return [row for batch in micro_batches for row in batch.tokens.view(-1, seq_length).tolist()]


def assert_same(one: Iterable[Batch], other: Iterable[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert (a.packed_seq_params is None) == (b.packed_seq_params is None)
        if a.packed_seq_params is not None and b.packed_seq_params is not None:
            assert a.packed_seq_params.offsets == b.packed_seq_params.offsets


def test_samples_come_in_order_and_the_rest_is_dropped() -> None:
    dataset = mock(11)
    assert rows(batches(dataset, 0, 2)) == [dataset[i].tokens.tolist() for i in range(10)]
    assert rows(batches(dataset, 3, 4)) == [dataset[i].tokens.tolist() for i in range(3, 11)]


@settings(max_examples=30)
@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_a_round_is_dealt_out_to_the_ranks(size: int, micro_batch_size: int, dp_size: int) -> None:
    dataset = mock(size)
    ranks = [list(batches(dataset, 0, micro_batch_size, rank, dp_size)) for rank in range(dp_size)]
    dealt = [row for turn in zip(*ranks, strict=True) for row in rows(turn)]
    stride = micro_batch_size * dp_size
    assert dealt == [dataset[i].tokens.tolist() for i in range(size // stride * stride)]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_resuming_anywhere_equals_never_stopping(tmp_path: Path, packed: bool) -> None:
    """Through several epochs of a blend whose epochs end within samples."""
    a = write_corpus(tmp_path / "a", numbered_documents([5, 1, 9, 2]))
    b = write_corpus(tmp_path / "b", numbered_documents([3, 8, 4, 6, 2, 2], first=5000))
    config = DataConfig(data_path=("0.3", a, "0.7", b), split="1", seq_length=7, reset_attention_mask=packed)

    def dataset(size: int) -> SampleDataset:
        training, _, _ = build_datasets(config, (size, 0, 0), NullTokenizer(9999))
        assert training is not None
        return training

    whole = list(batches(dataset(48), 0, 2, 1, 2))
    assert len(whole) == 12
    for done in range(13):
        assert_same(batches(dataset(48), 4 * done, 2, 1, 2), whole[done:])
        # The run may have been prolonged meanwhile.
        assert_same(islice(batches(dataset(480), 4 * done, 2, 1, 2), 12 - done), whole[done:])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_reader_processes_change_nothing(packed: bool) -> None:
    dataset = mock(40, packed)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert_same(batches(dataset, 4, 3, 1, 2, num_workers=2), batches(dataset, 4, 3, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)


class _Signalled(SampleDataset):
    """Every sample is read in a process that has just got the signals a scheduler sends."""

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


def test_reader_processes_outlive_the_signals_of_a_scheduler() -> None:
    signalled = _Signalled(MockStream(0, 6, 1, RULES), 8)
    assert_same(batches(signalled, 0, 2, num_workers=1), batches(mock(8), 0, 2))


def test_a_position_past_the_end_is_refused() -> None:
    with one_sentence("12 samples are already consumed", "only 11", "--train-iters"):
        batches(mock(11), 12, 2)
    assert list(batches(mock(11), 11, 2)) == []
