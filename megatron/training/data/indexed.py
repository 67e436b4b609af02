"""Megatron's indexed token files: `X.bin` holds token ids back to back, `X.idx` says where each sequence lies.

`X.idx`, little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version (1), uint8 dtype code, uint64 number of sequences,
uint64 number of document indices, then int32 sequence lengths, int64 byte positions in `X.bin`, and int64 document
indices: document d is the sequences from index d up to index d + 1. The first is 0; the last is the number of
sequences, and where a writer left that one out it is implied.

Reading maps both files, so opening one costs nothing but the checks: every count, every position and the length of
`X.bin` are compared once, and a damaged file is refused by name before training starts and not in the middle of it.

Writing goes to temporary names beside the target, which are flushed to the disk and renamed at the end, `X.idx` last:
where there is an `X.idx`, the pair is complete. A write that fails or is interrupted removes its temporary files.

Left out: the multimodal variant's sequence modes, and object stores.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_HEADER = struct.Struct("<9sQBQQ")
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")
_REMAKE = "write it again with megatron.training.preprocess_data or copy it again"


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """The smallest dtype Megatron writes for ids below `vocab_size`: uint16 below 65,500, int32 from there on."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def strip_suffix(path: str | Path) -> str:
    """The prefix X, whether the user wrote X, X.idx or X.bin."""
    text = str(path)
    return text[:-4] if text.endswith((".idx", ".bin")) else text


class IndexedDataset:
    """A read-only view of `X.idx` and `X.bin`.

    Args:
        path_prefix: X.

    Raises:
        ValueError: a file is missing, truncated, not of this format, or the two do not fit together.
    """

    def __init__(self, path_prefix: str | Path) -> None:
        self.path_prefix = strip_suffix(path_prefix)
        self._idx_path, self._bin_path = f"{self.path_prefix}.idx", f"{self.path_prefix}.bin"
        for path in (self._idx_path, self._bin_path):
            if not os.path.isfile(path):
                raise ValueError(
                    f"{path} does not exist, but indexed data are a pair of .idx and .bin: check the path (it is given "
                    "without .idx and .bin), or make the pair with megatron.training.preprocess_data."
                )
        self._read_index()
        self._check_documents()
        self._check_sequences()
        self._tokens = _map(self._bin_path)

    def _read_index(self) -> None:
        path, size = self._idx_path, os.path.getsize(self._idx_path)
        if size < _HEADER.size:
            raise ValueError(f"{path} is {size} bytes, less than the {_HEADER.size} of an index's header: {_REMAKE}.")
        index = _map(path)
        magic, version, code, sequences, documents = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != MAGIC:
            raise ValueError(
                f"{path} begins with {magic!r} and not with {MAGIC!r}, so it is no Megatron index: {_REMAKE}."
            )
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, but only version {VERSION} can be read: {_REMAKE}.")
        if code not in DTYPES:
            known = ", ".join(f"{number} {dtype.name}" for number, dtype in DTYPES.items())
            raise ValueError(f"{path} has the dtype code {code}, but the known ones are {known}: {_REMAKE}.")
        starts = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents], dtype=object)
        if size != starts[-1]:
            problem = "truncated" if size < starts[-1] else "of another format (sequence modes are not supported)"
            raise ValueError(
                f"{path} is {size} bytes, but its {sequences} sequences and {documents} document indices take "
                f"{starts[-1]}, so it is {problem}: {_REMAKE}."
            )
        self.dtype = DTYPES[code]
        self.sequence_lengths = index[starts[0] : starts[1]].view(_LENGTH)
        self.sequence_pointers = index[starts[1] : starts[2]].view(_POINTER)
        self.document_indices = index[starts[2] : starts[3]].view(_POINTER)

    def _check_documents(self) -> None:
        bounds, sequences = self.document_indices, len(self.sequence_lengths)
        ordered = (
            len(bounds) > 0 and bounds[0] == 0 and bounds[-1] <= sequences and bool((bounds[1:] >= bounds[:-1]).all())
        )
        if not ordered:
            raise ValueError(
                f"{self._idx_path} has document indices that do not rise from 0 to its {sequences} sequences, so it is "
                f"damaged: {_REMAKE}."
            )
        if bounds[-1] < sequences:
            bounds = np.append(bounds, sequences)
        self._document_bounds = bounds

    def _check_sequences(self) -> None:
        size, block = os.path.getsize(self._bin_path), 1 << 20
        for first in range(0, len(self), block):  # in blocks: an index may have hundreds of millions of sequences
            lengths = self.sequence_lengths[first : first + block].astype(np.int64)
            pointers = self.sequence_pointers[first : first + block]
            if lengths.min() < 0 or pointers.min() < 0:
                raise ValueError(f"{self._idx_path} has a negative length or position, so it is damaged: {_REMAKE}.")
            needed = max(int(pointers.max()), int((pointers + lengths * self.dtype.itemsize).max()))  # the sum may wrap
            if needed > size:
                raise ValueError(
                    f"{self._bin_path} is {size} bytes, but {self._idx_path} points as far as {needed}, so it is "
                    f"truncated or belongs to another index: {_REMAKE}."
                )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.path_prefix,)  # another process maps the files itself

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `[offset, offset + length)` of sequence `index`, or up to its end; a view of the file, not a copy."""
        available = int(self.sequence_lengths[index]) - offset
        count = available if length is None else length
        assert 0 <= offset and 0 <= count <= available, "a read outside the sequence"
        start = int(self.sequence_pointers[index]) + offset * self.dtype.itemsize
        return self._tokens[start : start + count * self.dtype.itemsize].view(self.dtype)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._document_bounds) - 1

    def document_lengths(self) -> np.ndarray:
        """Tokens of each document, int64."""
        ends = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.sequence_lengths, dtype=np.int64, out=ends[1:])
        return np.diff(ends[self._document_bounds])

    def read_document(self, document: int, offset: int, length: int) -> np.ndarray:
        """Tokens `[offset, offset + length)` of document `document`."""
        pieces = []
        for sequence in range(self._document_bounds[document], self._document_bounds[document + 1]):
            available = int(self.sequence_lengths[sequence])
            if offset < available and length > 0:
                pieces.append(self.get(sequence, offset, min(length, available - offset)))
                length -= len(pieces[-1])
            offset = max(0, offset - available)
        assert length == 0, "a read past the document's end"
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self.dtype), *pieces])


def _map(path: str) -> np.ndarray:
    if os.path.getsize(path) == 0:
        return np.empty(0, dtype=np.uint8)  # nothing to map, and mmap refuses it
    return np.memmap(path, dtype=np.uint8, mode="r")


class IndexedDatasetBuilder:
    """Writes `X.bin` and `X.idx`. A context manager: leaving it completes the pair, leaving it by an error removes it.

    Args:
        path_prefix: X.
        dtype: of the tokens, one of `DTYPES`.
    """

    def __init__(self, path_prefix: str | Path, dtype: np.dtype | type | str = DTYPES[4]) -> None:
        self.path_prefix = str(path_prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            known = ", ".join(known.name for known in DTYPES.values())
            raise ValueError(f"dtype {self.dtype.name} cannot be stored in {path_prefix}.bin: choose from {known}.")
        self._code = codes[0]
        self._lengths: list[int] = []
        self._document_indices: list[int] = [0]
        self._temporary = {suffix: f"{self.path_prefix}{suffix}.{os.getpid()}.tmp" for suffix in (".bin", ".idx")}
        try:
            self._bin: BinaryIO = open(self._temporary[".bin"], "wb")
        except OSError as error:
            raise ValueError(
                f"{path_prefix}.bin cannot be written ({error.strerror}): choose another prefix."
            ) from error

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return len(self._document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(self._lengths)

    def add_item(self, tokens: ArrayLike) -> None:
        """Append one sequence.

        Raises:
            ValueError: a token does not fit the dtype.
        """
        values = np.asarray(tokens)
        if values.size and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if values.dtype.kind not in "iu" or values.min() < limits.min or values.max() > limits.max:
                raise ValueError(
                    f"{self.path_prefix}.bin stores {self.dtype.name}, but a sequence has {values.dtype.name} values "
                    f"from {values.min()} to {values.max()}: choose a wider dtype."
                )
        self._bin.write(values.astype(self.dtype).tobytes())
        self._lengths.append(values.size)

    def end_document(self) -> None:
        """End the document that the sequences since the last call make up."""
        self._document_indices.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document of one sequence."""
        self.add_item(tokens)
        self.end_document()

    def finalize(self) -> None:
        """Complete the pair under its own name, replacing an older one."""
        try:
            _sync_and_close(self._bin)
            lengths = np.array(self._lengths, dtype=_LENGTH)
            pointers = np.zeros(len(lengths), dtype=_POINTER)
            np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
            with open(self._temporary[".idx"], "wb") as index:
                index.write(_HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._document_indices)))
                index.write(lengths.tobytes())
                index.write((pointers * self.dtype.itemsize).tobytes())
                index.write(np.array(self._document_indices, dtype=_POINTER).tobytes())
                _sync_and_close(index)
            # An older index goes first: it must never stand beside the new tokens.
            Path(f"{self.path_prefix}.idx").unlink(missing_ok=True)
            for suffix in (".bin", ".idx"):
                os.replace(self._temporary[suffix], f"{self.path_prefix}{suffix}")
            _sync_directory(self.path_prefix)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written."""
        self._bin.close()
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_directory(path: str) -> None:
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
