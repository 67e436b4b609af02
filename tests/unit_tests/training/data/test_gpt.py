"""The stream of samples against its description, token by token."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.data.batch import SampleRules
from megatron.training.data.gpt import GPTStream
from megatron.training.data.indexed import IndexedDataset, IndexedDatasetBuilder
from tests.unit_tests.training.data.corpora import EOD, PACKED, RULES, numbered_documents, write_corpus
from tests.unit_tests.training.data.sentences import one_sentence

LENGTHS = [5, 0, 1, 12, 3, 0, 7, 30, 2]


def stream(folder: Path, seq_length: int = 8, seed: int = 1, rules: SampleRules = RULES) -> GPTStream:
    prefix = write_corpus(folder / "d", numbered_documents(LENGTHS))
    return GPTStream(IndexedDataset(prefix), (0, len(LENGTHS)), seq_length, seed, rules)


def windows_in_order(source: GPTStream, seq_length: int, epochs: int) -> list[np.ndarray]:
    """Tokens and last label of every window that begins in the first epochs, put back in the order of the stream."""
    count = -(-epochs * source.num_tokens // seq_length)
    order: list[int] = []
    for epoch in range(epochs):
        order += [len(order) + int(window) for window in source._epoch(epoch).windows]
    windows: list[np.ndarray] = [np.empty(0)] * count
    for index, window in enumerate(order):
        sample = source.sample(index)
        windows[window] = np.append(sample.tokens, sample.labels[-1])
    return windows


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.integers(1, 20),
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
)
def test_every_epoch_holds_every_document_whole_and_once(
    lengths: list[int], seq_length: int, seed: int, epochs: int
) -> None:
    documents = numbered_documents(lengths)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(Path(folder) / "d", documents)
        source = GPTStream(IndexedDataset(prefix), (0, len(documents)), seq_length, seed, RULES)
        windows = windows_in_order(source, seq_length, epochs)
    for before, after in zip(windows, windows[1:], strict=False):
        assert before[-1] == after[0]  # a window's last label is the next one's first token
    joined = np.concatenate([window[:-1] for window in windows]).tolist()
    total = sum(lengths)
    assert len(joined) >= epochs * total
    for epoch in range(epochs):
        tokens, seen = joined[epoch * total : (epoch + 1) * total], []
        while tokens:
            document = next(d for d in documents if d and d[0] == tokens[0])
            assert tokens[: len(document)] == document
            seen.append(document)
            tokens = tokens[len(document) :]
        assert sorted(seen) == sorted(d for d in documents if d)


def test_samples_are_shuffled_within_their_epoch(tmp_path: Path) -> None:
    source = stream(tmp_path, seq_length=3)
    counts = [-(-e * 60 // 3) for e in range(4)]
    orders = [source._epoch(e).windows.tolist() for e in range(3)]
    for order, first, last in zip(orders, counts, counts[1:], strict=False):
        assert sorted(order) == list(range(last - first)) and order != sorted(order)
    assert orders[0] != orders[1]
    assert source._epoch(0).documents.tolist() != source._epoch(1).documents.tolist()


def test_the_order_is_fixed_for_good(tmp_path: Path) -> None:
    """Numbers written down: a change of them would change the data of every run that is resumed."""
    source = stream(tmp_path)
    assert source._epoch(0).documents.tolist() == GOLDEN_DOCUMENTS
    assert [source.sample(i).tokens[0] for i in range(8)] == GOLDEN_FIRST_TOKENS


GOLDEN_DOCUMENTS = [2, 7, 3, 6, 0, 1, 4, 5, 8]
GOLDEN_FIRST_TOKENS = [1043, 1005, 1051, 1007, 1035, 1026, 1019, 1015]


def test_samples_do_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    one = stream(tmp_path)
    expected = [one.sample(i) for i in range(40)]
    another = stream(tmp_path)
    for i in [39, 0, 20, 7, 38, 1, 21, 0]:  # back and forth through epochs that the cache has dropped
        for got, want in zip(another.sample(i), expected[i], strict=True):
            np.testing.assert_array_equal(got, want)


def test_seeds_differ(tmp_path: Path) -> None:
    firsts = {tuple(stream(tmp_path, seed=seed).sample(0).tokens.tolist()) for seed in range(6)}
    assert len(firsts) > 3


def test_labels_are_shifted_and_nothing_is_masked_in_plain_samples(tmp_path: Path) -> None:
    sample = stream(tmp_path).sample(2)
    assert sample.tokens.dtype == sample.labels.dtype == np.int64
    np.testing.assert_array_equal(sample.tokens[1:], sample.labels[:-1])
    assert sample.loss_mask.dtype == np.float32 and sample.loss_mask.tolist() == [1] * 8
    assert sample.starts is None


def test_only_the_given_documents_are_read(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", numbered_documents(LENGTHS))
    source = GPTStream(IndexedDataset(prefix), (3, 5), 4, 1, RULES)
    tokens = {int(token) for i in range(20) for token in source.sample(i).tokens}
    assert tokens == set(range(1006, 1021))


def test_a_corpus_shorter_than_a_sample_repeats(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", [[1], [2, 3]])
    sample = GPTStream(IndexedDataset(prefix), (0, 2), 10, 1, PACKED).sample(3)
    assert set(sample.tokens.tolist()) == {1, 2, 3}
    assert sample.starts is not None
    text = sample.tokens.tolist()
    assert sample.starts.tolist() == [i for i in range(10) if i == 0 or text[i] != 3]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_integer_files_of_every_width(tmp_path: Path, dtype: type) -> None:
    prefix = write_corpus(tmp_path / "d", [[1, 2, 3, 4]], dtype)
    sample = GPTStream(IndexedDataset(prefix), (0, 1), 3, 1, RULES).sample(0)
    assert sample.tokens.tolist() == [1, 2, 3] and sample.labels.tolist() == [2, 3, 4]


def test_float_files_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", [[1, 2]], np.float32)
    with one_sentence("d.bin stores float32", "integer dtype"):
        GPTStream(IndexedDataset(prefix), (0, 1), 3, 1, RULES)


def test_documents_without_tokens_are_refused(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "d", [[], [], [1]])
    with one_sentence("d.bin has no tokens in its documents 0 to 2", "--split"):
        GPTStream(IndexedDataset(prefix), (0, 2), 3, 1, RULES)


@pytest.mark.parametrize("tokens,stray", [([5, 257], 257), ([-1, 5], -1)])
def test_tokens_that_the_tokenizer_lacks_are_refused(tmp_path: Path, tokens: list[int], stray: int) -> None:
    prefix = write_corpus(tmp_path / "d", [tokens])
    rules = SampleRules(eod=EOD, vocab_size=257, reset_attention_mask=False, eod_mask_loss=False)
    with one_sentence(f"d.bin holds the token {stray}", "ids 0 to 256", "--tokenizer-model"):
        GPTStream(IndexedDataset(prefix), (0, 1), 3, 1, rules).sample(0)


def test_documents_of_several_sequences_stay_whole(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_item([1, 2])
        builder.add_item([3])
        builder.end_document()
    sample = GPTStream(IndexedDataset(tmp_path / "d"), (0, 1), 5, 1, PACKED).sample(0)
    assert sample.tokens.tolist() == [1, 2, 3, 1, 2]
    assert sample.starts is not None and sample.starts.tolist() == [0, 3]
