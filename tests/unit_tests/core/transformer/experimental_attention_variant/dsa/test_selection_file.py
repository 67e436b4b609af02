"""The file of selected keys: its rows are read where they are needed, and damage of every kind is named."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, load_topk, save_topk, selection_file
from megatron.core.transformer.experimental_attention_variant.dsa.selection_file import read_topk

from .selections import LAYERS, LENGTHS, PACKED, PADDED, K, assert_same, present, record, shards, truth


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "keys.safetensors"
    save_topk(path, record(PACKED), PACKED)
    return path


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_read_in_blocks(saved: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_file, "_BLOCK_ROWS", rows)
    assert_same(load_topk(saved, PADDED), record(PADDED))
    for shard in shards(2):
        own = present(shard, 2)
        assert_same(load_topk(saved, shard, documents=own), record(shard, own))
    blocks = list(read_topk(saved).blocks(4, 2, 3, 11))
    assert [first for first, _ in blocks] == list(range(3, 11, rows))
    assert torch.equal(torch.cat([ids for _, ids in blocks]), truth(12, 4, 2)[3:11].int())


def test_only_the_rows_at_hand_are_read(tmp_path: Path) -> None:
    path, whole = tmp_path / "keys", Layout.causal(1, 6)
    ids = truth(6, 1, 0).int()
    ids[3] = 99
    save_file({"layer.1.document.0": ids}, path)
    for start, stop in ((0, 3), (4, 6)):
        loaded = load_topk(path, whole.slice_rows(start, stop))[1]
        assert torch.equal(loaded.indices_TK, ids[start:stop])
    with pytest.raises(ValueError, match="token 3 of layer 1, document 0 selects no key"):
        load_topk(path, whole.slice_rows(3, 4))


def test_rows_in_order_are_not_sorted_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = record(PACKED)
    monkeypatch.setattr(Tensor, "sort", None)
    assert_same(load_topk(saved, PACKED), expected)


def test_an_engines_file_may_be_unsorted_wide_and_int64(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    shuffled = {
        f"layer.{layer}.document.{m}": truth(n, layer, m).flip(-1) for layer in LAYERS for m, n in enumerate(LENGTHS)
    }
    save_file(shuffled, path)
    assert_same(load_topk(path, PACKED), record(PACKED))


def test_the_width_survives_documents_shorter_than_it(tmp_path: Path) -> None:
    layout, path = Layout.packed((0, 2)), tmp_path / "short"
    save_topk(path, record(layout, [0], [2]), layout)
    assert read_topk(path).topk == K and load_topk(path, layout)[1].indices_TK.shape == (2, K)


BAD_ROWS = {
    "a future key": [[0, -1], [2, -1], [0, 1]],
    "a key twice": [[0, -1], [1, 1], [0, 1]],
    "a negative position": [[0, -1], [-2, 0], [0, 1]],
    "no key": [[0, -1], [-1, -1], [0, 1]],
    "a position past the document": [[0, -1], [9, -1], [0, 1]],
    "the document's end": [[0, -1], [0, 3], [0, 1]],
    "the largest number": [[0, -1], [0, 2**31 - 1], [0, 1]],
    "more than 32 bits": [[0, -1], [2**32, -1], [0, 1]],
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_an_impossible_selection_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys"
    for dtype in (torch.int64, torch.int32)[: 1 if "32 bits" in name else 2]:
        save_file({"layer.2.document.0": torch.tensor(BAD_ROWS[name], dtype=dtype)}, path)
        with pytest.raises(ValueError, match="token 1 of layer 2, document 0 selects no key"):
            load_topk(path, Layout.packed((0, 3)))


def test_a_damaged_or_foreign_file_is_named(saved: Path, tmp_path: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "bad"
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"has {len(whole) - 1} bytes, but its header names {len(whole)}"):
        read_topk(path)
    for content in (b"", b"1234567", whole[:100], b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no safetensors file"):
            read_topk(path)
    foreign = [
        ({"weight": torch.zeros(2, 2)}, "holds 'weight' of type F32"),
        ({"layer.1.document.0": torch.zeros(2, 2)}, "holds 'layer.1.document.0' of type F32"),
        ({"layer.1.document.0": torch.zeros(2, dtype=torch.int32)}, r"shape \[2\]"),
        ({"layer.1.document.0": torch.zeros(2, 0, dtype=torch.int32)}, r"shape \[2, 0\].*none of them empty"),
        ({"layer.1.document.1": torch.zeros(2, 1, dtype=torch.int32)}, "the same documents, counted from 0"),
        (
            {"layer.1.document.0": torch.zeros(2, 1, dtype=torch.int32),
             "layer.2.document.0": torch.zeros(3, 1, dtype=torch.int32)},
            "equally long",
        ),
        (
            {"layer.1.document.0": torch.zeros(2, 1, dtype=torch.int32),
             "layer.2.document.1": torch.zeros(2, 1, dtype=torch.int32)},
            "the same documents",
        ),
    ]  # fmt: skip
    for tensors, message in foreign:
        save_file(tensors, path)
        with pytest.raises(ValueError, match=message):
            read_topk(path)
    with pytest.raises(FileNotFoundError):
        load_topk(tmp_path / "gone", PACKED)


GOOD_ENTRY: dict[str, Any] = {"dtype": "I32", "shape": [1, 1], "data_offsets": [0, 4]}
BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "metadata that is no object": ({"__metadata__": "x"}, "is no safetensors file"),
    "a width that is no number": ({"__metadata__": {"topk": "all"}}, "is no safetensors file"),
    "a negative offset": ({"data_offsets": [-4, 0]}, "is no safetensors file"),
    "an offset that is no number": ({"data_offsets": [0, "4"]}, "is no safetensors file"),
    "three offsets": ({"data_offsets": [0, 2, 4]}, "is no safetensors file"),
    "a type that is no name": ({"dtype": ["I32"]}, r"of type \['I32'\]"),
    "a shape that is no list": ({"shape": 1}, "and shape 1, but"),
    "a negative shape": ({"shape": [-1, -1]}, r"and shape \[-1, -1\], but"),
    "a shape of words": ({"shape": ["a", 1]}, r"and shape \['a', 1\], but"),
    "a shape of other bytes": ({"shape": [1, 2]}, "has 4 bytes for a shape of 8"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_means_nothing_is_named(tmp_path: Path, name: str) -> None:
    change, message = BAD_HEADERS[name]
    metadata = {key: value for key, value in change.items() if key == "__metadata__"}
    entry = GOOD_ENTRY | {key: value for key, value in change.items() if key != "__metadata__"}
    text = json.dumps(metadata | {"layer.1.document.0": entry}).encode()
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ValueError, match=message):
        read_topk(path)


def test_a_header_too_deep_to_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(struct.pack("<Q", 10**6) + b"[" * 10**6)
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_topk(path)
