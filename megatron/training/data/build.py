"""Training, validation and test datasets from the options.

Each is a map from sample number to sample, as long as the run asks for; the streams behind it have no end. Documents
are cut into the three sets in the order of the file, by --split, at the same document numbers as Megatron cuts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from torch.utils.data import Dataset

from megatron.training.data.batch import Sample, SampleRules
from megatron.training.data.blend import BlendEntry, BlendOrder, integer_shares, parse_blend
from megatron.training.data.config import DEFAULT_SPLIT, DataConfig
from megatron.training.data.gpt import GPTStream
from megatron.training.data.indexed import IndexedDataset
from megatron.training.data.mock import MockStream
from megatron.training.tokenizer import Tokenizer, build_tokenizer

SPLITS = ("training", "validation", "test")


class SampleStream(Protocol):
    """Endless samples, each a function of its number."""

    def sample(self, index: int) -> Sample: ...


class BlendStream:
    """Samples of several streams in the proportion of `shares`, laid out for `size` samples."""

    def __init__(self, streams: Sequence[SampleStream], shares: Sequence[int], size: int) -> None:
        self._streams, self._order = streams, BlendOrder(shares, size)

    def sample(self, index: int) -> Sample:
        """Sample `index` of the blend."""
        stream, place = self._order[index]
        return self._streams[stream].sample(place)


class SampleDataset(Dataset[Sample]):
    """The first `size` samples of a stream."""

    def __init__(self, stream: SampleStream, size: int) -> None:
        self._stream, self._size = stream, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size}")
        return self._stream.sample(index)


Datasets = tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]


def split_documents(num_documents: int, shares: Sequence[Fraction]) -> list[tuple[int, int]]:
    """First and last + 1 of each set's documents."""
    bounds = [0]
    for end in range(1, len(shares) + 1):
        bounds.append(round(float(sum(shares[:end]) * num_documents)))
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def build_datasets(config: DataConfig, sizes: tuple[int, int, int], tokenizer: Tokenizer | None = None) -> Datasets:
    """Build the training, validation and test dataset with `sizes` samples each.

    A set is None where its size is 0, its share of --split is 0, or no path was given for it.

    Raises:
        ValueError: no data are given, a file is damaged, or a set that was asked for would be empty.
    """
    if config.seq_length is None:
        raise ValueError("--seq-length is not set, but it says how long a sample is: give it.")
    if not (config.mock_data or config.data_path or config.train_data_path):
        raise ValueError("No data are given: name files with --data-path or --train-data-path, or try --mock-data.")
    tokenizer = tokenizer or build_tokenizer(config.tokenizer_type, config.tokenizer_model)
    rules = SampleRules(tokenizer.eod, tokenizer.vocab_size, config.reset_attention_mask, config.eod_mask_loss)
    training, validation, test = (_build_split(config, rules, split, size) for split, size in enumerate(sizes))
    return training, validation, test


def _build_split(config: DataConfig, rules: SampleRules, split: int, size: int) -> SampleDataset | None:
    assert config.seq_length is not None
    if size == 0:
        return None
    if config.mock_data:
        return SampleDataset(MockStream(split, config.seq_length, config.seed, rules), size)
    own_path = (config.train_data_path, config.valid_data_path, config.test_data_path)[split]
    cut = bool(config.data_path)
    path = config.data_path if cut else own_path
    if not path or (cut and config.split_shares()[split] == 0):
        return None
    entries = parse_blend("--data-path", path)
    streams = [_open_stream(config, rules, entry, split, cut) for entry in entries]
    if len(streams) == 1:
        return SampleDataset(streams[0], size)
    weights = [entry.weight or stream.num_tokens for entry, stream in zip(entries, streams, strict=True)]
    return SampleDataset(BlendStream(streams, integer_shares(weights), size), size)


def _open_stream(config: DataConfig, rules: SampleRules, entry: BlendEntry, split: int, cut: bool) -> GPTStream:
    assert config.seq_length is not None
    data = IndexedDataset(entry.prefix)
    documents = (0, data.num_documents)
    if cut:
        documents = split_documents(data.num_documents, config.split_shares())[split]
    if documents[0] == documents[1]:
        raise ValueError(
            f"--split {config.split or DEFAULT_SPLIT} leaves the {SPLITS[split]} set none of the {data.num_documents} "
            f"documents of {entry.prefix}: change --split, or give that set a share of 0 to do without it."
        )
    return GPTStream(data, documents, config.seq_length, config.seed, rules)
