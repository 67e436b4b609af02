"""The indexed format against bytes laid out by hand, round trips, every refusal, and writes that fail."""

import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from megatron.training.data.indexed import DTYPES, IndexedDataset, IndexedDatasetBuilder, dtype_for_vocab
from tests.unit_tests.training.data.sentences import one_sentence

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def index_bytes(
    code: int = 8,
    lengths: tuple[int, ...] = (3, 0, 2),
    pointers: tuple[int, ...] = (0, 6, 6),
    documents: tuple[int, ...] = (0, 1, 3),
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
) -> bytes:
    """An index file as the format's description says, field by field."""
    parts = [magic, struct.pack("<Q", version), struct.pack("<B", code)]
    parts += [struct.pack("<Q", len(lengths)), struct.pack("<Q", len(documents))]
    parts += [struct.pack("<i", length) for length in lengths]
    parts += [struct.pack("<q", pointer) for pointer in pointers]
    parts += [struct.pack("<q", document) for document in documents]
    return b"".join(parts)


def write_pair(folder: Path, index: bytes | None, tokens: bytes | None) -> Path:
    prefix = folder / "data"
    if index is not None:
        Path(f"{prefix}.idx").write_bytes(index)
    if tokens is not None:
        Path(f"{prefix}.bin").write_bytes(tokens)
    return prefix


TOKENS = struct.pack("<5H", 7, 8, 65535, 1, 2)


def test_a_file_laid_out_by_hand_reads_right(tmp_path: Path) -> None:
    data = IndexedDataset(write_pair(tmp_path, index_bytes(), TOKENS))
    assert [data[i].tolist() for i in range(len(data))] == [[7, 8, 65535], [], [1, 2]]
    assert data.dtype == np.uint16
    assert data.sequence_lengths.tolist() == [3, 0, 2]
    assert data.sequence_pointers.tolist() == [0, 6, 6]
    assert data.document_indices.tolist() == [0, 1, 3]
    assert data.num_documents == 2 and data.document_lengths().tolist() == [3, 2]
    assert data.get(0, 1, 2).tolist() == [8, 65535] and data.get(2, 1).tolist() == [2]


def test_sequences_may_lie_anywhere_in_the_tokens(tmp_path: Path) -> None:
    data = IndexedDataset(write_pair(tmp_path, index_bytes(lengths=(2, 2), pointers=(6, 1), documents=(0, 2)), TOKENS))
    assert data[0].tolist() == [1, 2]
    assert data[1].tobytes() == TOKENS[1:5]  # at an odd byte
    assert data.read_document(0, 0, 4).tolist() == [*data[0], *data[1]]


def test_the_last_document_index_may_be_implied(tmp_path: Path) -> None:
    data = IndexedDataset(write_pair(tmp_path, index_bytes(documents=(0, 1)), TOKENS))
    assert data.num_documents == 2 and data.document_lengths().tolist() == [3, 2]
    assert data.document_indices.tolist() == [0, 1]


def test_read_document_spans_sequences(tmp_path: Path) -> None:
    lengths = (2, 0, 3, 1)
    with IndexedDatasetBuilder(tmp_path / "d", np.int32) as builder:
        builder.add_document([99])
        for start, length in zip((0, 2, 2, 5), lengths, strict=True):
            builder.add_item(range(start, start + length))
        builder.end_document()
        builder.end_document()
    data = IndexedDataset(tmp_path / "d")
    assert data.document_lengths().tolist() == [1, 6, 0]
    for offset in range(7):
        for length in range(7 - offset):
            assert data.read_document(1, offset, length).tolist() == list(range(offset, offset + length))
    with pytest.raises(AssertionError, match="past the document's end"):
        data.read_document(1, 3, 4)
    with pytest.raises(AssertionError, match="outside the sequence"):
        data.get(0, 0, 2)


@pytest.mark.parametrize("name,code", CODES.items())
def test_every_dtype_code(tmp_path: Path, name: str, code: int) -> None:
    values = np.array([1, 2, 3], dtype=name)
    with IndexedDatasetBuilder(tmp_path / "d", np.dtype(name)) as builder:
        builder.add_document(values)
    raw = (tmp_path / "d.idx").read_bytes()
    assert raw == index_bytes(code=code, lengths=(3,), pointers=(0,), documents=(0, 1))
    assert (tmp_path / "d.bin").read_bytes() == values.tobytes()
    assert IndexedDataset(tmp_path / "d")[0].dtype == values.dtype


@st.composite
def corpora(draw: st.DrawFn) -> tuple[np.dtype, list[list[np.ndarray]]]:
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES.values() if dtype.kind in "iu"]))
    sequence = npst.arrays(dtype, st.integers(0, 9))
    return dtype, draw(st.lists(st.lists(sequence, max_size=3), max_size=5))


@settings(max_examples=60)
@given(corpora())
def test_what_is_written_is_read(corpus: tuple[np.dtype, list[list[np.ndarray]]]) -> None:
    dtype, documents = corpus
    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetBuilder(f"{folder}/d", dtype) as builder:
            for document in documents:
                for sequence in document:
                    builder.add_item(sequence)
                builder.end_document()
            assert builder.num_documents == len(documents)
            assert builder.num_tokens == sum(sequence.size for document in documents for sequence in document)
        data = IndexedDataset(f"{folder}/d")
        sequences = [sequence for document in documents for sequence in document]
        assert len(data) == len(sequences) and data.dtype == dtype
        for i, sequence in enumerate(sequences):
            np.testing.assert_array_equal(data[i], sequence)
        assert data.document_lengths().tolist() == [sum(s.size for s in document) for document in documents]
        for i, document in enumerate(documents):
            whole = np.concatenate([np.empty(0, dtype), *document])
            np.testing.assert_array_equal(data.read_document(i, 0, whole.size), whole)
        assert sorted(os.listdir(folder)) == ["d.bin", "d.idx"]


def test_the_suffix_may_be_given(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path, index_bytes(), TOKENS)
    assert IndexedDataset(f"{prefix}.idx").path_prefix == IndexedDataset(f"{prefix}.bin").path_prefix == str(prefix)


def test_another_process_opens_the_files_itself(tmp_path: Path) -> None:
    data = IndexedDataset(write_pair(tmp_path, index_bytes(), TOKENS))
    assert len(pickle.dumps(data)) < 500
    assert pickle.loads(pickle.dumps(data))[0].tolist() == [7, 8, 65535]


REFUSED = {
    "no-idx": (None, TOKENS, ["data.idx does not exist", "check the path"]),
    "no-bin": (index_bytes(), None, ["data.bin does not exist", "check the path"]),
    "empty-idx": (b"", TOKENS, ["data.idx is 0 bytes", "less than the 34", "preprocess_data"]),
    "cut-header": (index_bytes()[:33], TOKENS, ["data.idx is 33 bytes"]),
    "cut-lengths": (index_bytes()[:40], TOKENS, ["data.idx is 40 bytes", "3 sequences", "take 94", "truncated"]),
    "cut-last-byte": (index_bytes()[:-1], TOKENS, ["data.idx is 93 bytes", "truncated"]),
    "more-bytes": (index_bytes() + bytes(3), TOKENS, ["data.idx is 97 bytes", "another format"]),
    "huge-count": (index_bytes()[:18] + b"\xff" * 8 + index_bytes()[26:], TOKENS, ["truncated"]),
    "magic": (index_bytes(magic=b"TNTIDX\x00\x00\x00"), TOKENS, ["begins with b'TNTIDX", "no Megatron index"]),
    "version": (index_bytes(version=2), TOKENS, ["version 2", "only version 1"]),
    "dtype-0": (index_bytes(code=0), TOKENS, ["dtype code 0", "8 uint16"]),
    "dtype-9": (index_bytes(code=9), TOKENS, ["dtype code 9", "1 uint8"]),
    "first-document": (index_bytes(documents=(1, 3)), TOKENS, ["document indices", "from 0 to its 3"]),
    "no-documents": (index_bytes(documents=()), TOKENS, ["document indices"]),
    "falling-documents": (index_bytes(documents=(0, 2, 1, 3)), TOKENS, ["document indices"]),
    "late-documents": (index_bytes(documents=(0, 4)), TOKENS, ["document indices"]),
    "negative-length": (index_bytes(lengths=(3, -1, 2)), TOKENS, ["negative length or position"]),
    "negative-pointer": (index_bytes(pointers=(0, -2, 6)), TOKENS, ["negative length or position"]),
    "cut-bin": (index_bytes(), TOKENS[:-1], ["data.bin is 9 bytes", "as far as 10", "truncated"]),
    "empty-bin": (index_bytes(), b"", ["data.bin is 0 bytes", "as far as 10"]),
    "far-pointer": (index_bytes(pointers=(0, 6, 2**63 - 2)), TOKENS, ["as far as 9223372036854775806"]),
}


@pytest.mark.parametrize("index,tokens,pieces", REFUSED.values(), ids=REFUSED.keys())
def test_damaged_files_are_refused(
    tmp_path: Path, index: bytes | None, tokens: bytes | None, pieces: list[str]
) -> None:
    with one_sentence(*pieces):
        IndexedDataset(write_pair(tmp_path, index, tokens))


def test_sizes_are_checked_past_the_first_block(tmp_path: Path) -> None:
    count = (1 << 20) + 3
    index = np.zeros(count, "<i4"), np.zeros(count, "<i8")
    index[0][-1] = 6
    header = index_bytes(lengths=(), pointers=(), documents=())[:18] + struct.pack("<QQ", count, 2)
    raw = header + index[0].tobytes() + index[1].tobytes() + struct.pack("<qq", 0, count)
    with one_sentence("data.bin is 10 bytes", "as far as 12"):
        IndexedDataset(write_pair(tmp_path, raw, TOKENS))


def test_the_smallest_dtype_holds_the_vocabulary() -> None:
    assert dtype_for_vocab(257) == np.uint16 == dtype_for_vocab(65499)
    assert dtype_for_vocab(65500) == np.int32


@pytest.mark.parametrize(
    "dtype,tokens",
    [(np.uint16, [70000]), (np.uint8, [1, -1]), (np.int32, [2**31]), (np.int32, [0.5])],
    ids=["uint16", "uint8", "int32", "float"],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, dtype: type, tokens: list[float]) -> None:
    with one_sentence("choose a wider dtype", np.dtype(dtype).name), IndexedDatasetBuilder(tmp_path / "d", dtype) as b:
        b.add_document(tokens)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with one_sentence("complex64", "choose from uint8"):
        IndexedDatasetBuilder(tmp_path / "d", np.complex64)
    with one_sentence("absent/d.bin cannot be written", "choose another prefix"):
        IndexedDatasetBuilder(tmp_path / "absent" / "d")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_older_pair(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_document([1, 2])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(KeyError), IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_document([3])
        raise KeyError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("failing_call", range(4))
def test_a_write_that_fails_while_finishing_leaves_no_mixed_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Calls 0 and 1 flush the two files, 2 and 3 rename them; the disk fails at one of them."""
    with IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_document([1, 2])
    calls = iter(range(9))

    def failing(real):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            if next(calls) == failing_call:
                raise OSError("disk full")
            return real(*args)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    with pytest.raises(OSError, match="disk full"), IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_document([3, 4, 5])
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.tmp"))
    if failing_call < 2:
        assert IndexedDataset(tmp_path / "d")[0].tolist() == [1, 2]
    else:
        assert not (tmp_path / "d.idx").exists()  # never an index beside tokens that are not its own


def test_sigkill_while_writing_leaves_no_pair(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal\n"
        "from megatron.training.data.indexed import IndexedDatasetBuilder\n"
        "with IndexedDatasetBuilder(sys.argv[1]) as builder:\n"
        "    builder.add_document(range(100000))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path / "d")], check=False)
    assert run.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
