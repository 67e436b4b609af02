"""Datasets from options: which file, which documents, how many samples, and what is refused."""

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.data.build import Datasets, SampleDataset, build_datasets, split_documents
from megatron.training.data.config import DataConfig
from megatron.training.tokenizer import NullTokenizer
from tests.unit_tests.training.data.corpora import numbered_documents, write_corpus
from tests.unit_tests.training.data.sentences import one_sentence

VOCABULARY = NullTokenizer(100_000)


def build(sizes: tuple[int, int, int], **options: Any) -> Datasets:
    return build_datasets(DataConfig(seq_length=4, **options), sizes, VOCABULARY)


def tokens(dataset: SampleDataset | None) -> set[int]:
    assert dataset is not None
    return {int(token) for i in range(len(dataset)) for token in dataset[i].tokens}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """100 documents of 3 tokens; document d begins with the token 1000 + 3 d."""
    return write_corpus(tmp_path / "a", numbered_documents([3] * 100))


@pytest.fixture
def other(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "b", numbered_documents([3] * 50, first=5000))


def test_split_cuts_documents_in_their_order(corpus: str) -> None:
    training, validation, test = build((200, 50, 20), data_path=(corpus,), split="80,15,5")
    assert tokens(training) == set(range(1000, 1240))
    assert tokens(validation) == set(range(1240, 1285))
    assert tokens(test) == set(range(1285, 1300))


@pytest.mark.parametrize(
    "documents,split,expected",
    [
        (1000, "969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        (10, "969,30,1", [(0, 10), (10, 10), (10, 10)]),
        (7, "1,1,1", [(0, 2), (2, 5), (5, 7)]),
        (5, "1,1", [(0, 2), (2, 5), (5, 5)]),  # 2.5 rounds to even, as Python's and Megatron's round does
        (0, "1", [(0, 0), (0, 0), (0, 0)]),
    ],
)
def test_split_documents(documents: int, split: str, expected: list[tuple[int, int]]) -> None:
    shares: tuple[Fraction, ...] = DataConfig(data_path=("A",), split=split).split_shares()
    assert split_documents(documents, shares) == expected


def test_the_default_split(corpus: str) -> None:
    training, _, _ = build((300, 0, 0), data_path=(corpus,))
    assert tokens(training) == set(range(1000, 1291))


def test_sets_of_their_own(corpus: str, other: str) -> None:
    training, validation, test = build((200, 100, 9), train_data_path=(corpus,), valid_data_path=(other,))
    assert tokens(training) == set(range(1000, 1300))
    assert tokens(validation) == set(range(5000, 5150))
    assert test is None


def test_sets_that_nobody_asked_for_are_none(corpus: str) -> None:
    assert build((0, 0, 0), data_path=(corpus,)) == (None, None, None)
    assert build((0, 5, 5), data_path=(corpus,), split="1")[1:] == (None, None)
    assert build((0, 0, 0), mock_data=True) == (None, None, None)


def test_a_dataset_has_as_many_samples_as_asked_for(corpus: str) -> None:
    training, _, _ = build((321, 0, 0), data_path=(corpus,))
    assert training is not None and len(training) == 321
    assert len(list(training)) == 321  # by IndexError, as iteration over a sequence ends
    with pytest.raises(IndexError, match="sample -1 of 321"):
        training[-1]


def test_a_blend_holds_the_weights(corpus: str, other: str) -> None:
    training, _, _ = build((500, 0, 0), data_path=("0.3", corpus, "0.7", other), split="1")
    assert training is not None
    from_other = np.cumsum([training[i].tokens[0] >= 5000 for i in range(500)])
    assert np.all(np.abs(from_other - 0.7 * np.arange(1, 501)) < 1)


def test_a_blend_without_weights_reads_all_of_each_in_the_same_time(corpus: str, other: str) -> None:
    training, _, _ = build((112, 0, 0), data_path=(corpus, other), split="1")  # 450 tokens, one epoch of each
    assert training is not None
    from_other = np.cumsum([training[i].tokens[0] >= 5000 for i in range(112)])
    assert np.all(np.abs(from_other - np.arange(1, 113) / 3) < 1)
    everything = set(range(1000, 1300)) | set(range(5000, 5150))
    assert len(everything - tokens(training)) <= 8  # the windows at the two epochs' ends may be among the next samples


def test_a_blend_reads_each_dataset_as_if_alone(corpus: str, other: str) -> None:
    blend, _, _ = build((60, 0, 0), data_path=("1", corpus, "2", other), split="1")
    alone, _, _ = build((40, 0, 0), data_path=(other,), split="1")
    assert blend is not None and alone is not None
    texts = [sample.tokens.tolist() for sample in blend if sample.tokens[0] >= 5000]
    assert texts == [sample.tokens.tolist() for sample in alone]


def test_a_longer_run_begins_like_a_shorter_one(corpus: str, other: str) -> None:
    for path in ((corpus,), ("0.3", corpus, "0.7", other)):
        short, _, _ = build((40, 0, 0), data_path=path)
        long, _, _ = build((4000, 0, 0), data_path=path)
        assert short is not None and long is not None
        assert [s.tokens.tolist() for s in short] == [long[i].tokens.tolist() for i in range(40)]


def test_datasets_travel_to_processes_that_share_no_memory(corpus: str, other: str) -> None:
    training, _, _ = build((40, 0, 0), data_path=("0.3", corpus, "0.7", other))
    copy = pickle.loads(pickle.dumps(training))
    assert training is not None and len(copy) == 40
    assert [sample.tokens.tolist() for sample in copy] == [sample.tokens.tolist() for sample in training]


def test_mock_sets_differ() -> None:
    sets = build_datasets(DataConfig(seq_length=16, mock_data=True), (3, 3, 3))
    texts = {tuple(sample.tokens.tolist()) for dataset in sets if dataset is not None for sample in dataset}
    assert len(texts) == 9
    assert max(max(text) for text in texts) <= 256


def test_the_tokenizer_is_built_from_the_options(corpus: str) -> None:
    training, _, _ = build_datasets(DataConfig(seq_length=4, data_path=(corpus,)), (9, 0, 0))
    assert training is not None
    with one_sentence("a.bin holds the token 1", "ids 0 to 256"):
        list(training)


def test_options_reach_the_samples(corpus: str) -> None:
    plain, _, _ = build((9, 0, 0), data_path=(corpus,))
    packed, _, _ = build((9, 0, 0), data_path=(corpus,), reset_attention_mask=True)
    assert plain is not None and plain[0].starts is None
    assert packed is not None and packed[0].starts is not None and packed[0].loss_mask.sum() < 4


def test_what_is_missing_is_said(corpus: str, tmp_path: Path) -> None:
    with one_sentence("--seq-length is not set"):
        build_datasets(DataConfig(mock_data=True), (1, 0, 0))
    with one_sentence("No data are given", "--mock-data"):
        build((1, 0, 0))
    with one_sentence("absent.idx does not exist"):
        build((1, 0, 0), data_path=(str(tmp_path / "absent"),))
    with one_sentence("needs --vocab-size"):
        build_datasets(DataConfig(seq_length=4, mock_data=True, tokenizer_type="NullTokenizer"), (1, 0, 0))


def test_a_set_that_would_be_empty_is_refused(tmp_path: Path) -> None:
    small = write_corpus(tmp_path / "small", numbered_documents([3] * 10))
    with one_sentence("--split 969,30,1 leaves the validation set none of the 10 documents", "small", "share of 0"):
        build((5, 5, 0), data_path=(small,))
    assert build((5, 0, 0), data_path=(small,))[1] is None
