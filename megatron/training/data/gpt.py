"""Samples out of the documents of one indexed file.

The documents are shuffled and laid end to end, and so are the epochs, each in another order. Window n is the tokens
[n * seq_length, n * seq_length + seq_length + 1) of that endless stream, one more than it advances, for the labels:
nothing is dropped and nothing is padded, and the window at an epoch's end reads on into the next. A document that a
window cuts goes on in the next window. The windows that begin in one epoch are then shuffled among themselves.

Three indices of an epoch, as in Megatron: documents in their order, where each ends in the epoch's tokens, and windows
in their order. They are vectorized, made when first read and kept in memory for two epochs (Megatron writes them to
files): 16 bytes a document and 8 bytes a window.

Unlike Megatron's, an epoch's order depends on the seed and the epoch's number alone, not on how many samples the run
asks for. So a run that is prolonged goes on through the same data. `RandomState` is used because NumPy freezes its
numbers; those of `default_rng` may change between releases.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.training.data.batch import Sample, SampleRules
from megatron.training.data.indexed import IndexedDataset


class EpochIndex(NamedTuple):
    """Documents in their order, cumulative tokens after each, and the epoch's windows in their order."""

    documents: np.ndarray
    ends: np.ndarray
    windows: np.ndarray


class GPTStream:
    """Endless samples of documents [first, last) of `data`.

    Args:
        data: the indexed file.
        documents: first and last + 1 of the documents to read.
        seq_length: tokens of a sample.
        seed: of the order.
        rules: what turns a window into a sample.

    Raises:
        ValueError: the documents hold no token, or the file does not hold token ids.
    """

    def __init__(
        self, data: IndexedDataset, documents: tuple[int, int], seq_length: int, seed: int, rules: SampleRules
    ) -> None:
        if data.dtype.kind not in "iu":
            raise ValueError(
                f"{data.path_prefix}.bin stores {data.dtype.name}, but tokens are whole numbers: make the file again "
                "with an integer dtype."
            )
        self._data, self._rules, self._seed, self._seq_length = data, rules, seed, seq_length
        self._first_document = documents[0]
        self._lengths = data.document_lengths()[documents[0] : documents[1]]
        self.num_tokens = int(self._lengths.sum())
        if self.num_tokens == 0:
            raise ValueError(
                f"{data.path_prefix}.bin has no tokens in its documents {documents[0]} to {documents[1]}: leave this "
                "dataset out, or change --split."
            )
        self._epochs: dict[int, EpochIndex] = {}

    def sample(self, index: int) -> Sample:
        """Sample `index`, counted from 0 without end."""
        epoch = index * self._seq_length // self.num_tokens  # where window `index` begins, and shuffling stays within
        first = self._first_window(epoch)
        window = first + int(self._epoch(epoch).windows[index - first])
        tokens, starts = self._read(window * self._seq_length, self._seq_length + 1)
        return self._rules.sample(tokens, starts, f"{self._data.path_prefix}.bin")

    def _first_window(self, epoch: int) -> int:
        return -(-epoch * self.num_tokens // self._seq_length)

    def _epoch(self, epoch: int) -> EpochIndex:
        if epoch not in self._epochs:
            if len(self._epochs) == 2:
                del self._epochs[next(iter(self._epochs))]  # the one made first
            documents = np.random.RandomState([self._seed, epoch, 0]).permutation(len(self._lengths))
            windows = self._first_window(epoch + 1) - self._first_window(epoch)
            self._epochs[epoch] = EpochIndex(
                documents=documents,
                ends=np.cumsum(self._lengths[documents]),
                windows=np.random.RandomState([self._seed, epoch, 1]).permutation(windows),
            )
        return self._epochs[epoch]

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + count) of the endless stream, and which of them begin a document."""
        tokens, starts = np.empty(count, dtype=np.int64), np.zeros(count, dtype=bool)
        done = 0
        while done < count:
            epoch, position = divmod(start + done, self.num_tokens)
            index = self._epoch(epoch)
            place = int(np.searchsorted(index.ends, position, side="right"))
            while done < count and place < len(index.documents):
                document = int(index.documents[place])
                length = int(self._lengths[document])
                offset = position - (int(index.ends[place]) - length)
                size = min(length - offset, count - done)
                if size > 0:
                    tokens[done : done + size] = self._data.read_document(self._first_document + document, offset, size)
                    starts[done] = offset == 0
                done, position, place = done + size, position + size, place + 1
        return tokens, starts
