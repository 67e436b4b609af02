"""Writing shards: the safetensors library reads them back; a writer that dies leaves nothing behind."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.core.models.hf.folder_writer import Entry, new_folder, plan_shards, write_tensors
from megatron.core.models.hf.tensor_folder import INDEX_NAME, SINGLE_NAME, TensorFolder

TENSORS = {
    "bf16": torch.randn(3, 5).bfloat16(),
    "fp32": torch.randn(7),
    "scalar": torch.tensor(2.5),
    "half": torch.randn(1, 1, 3).half(),
    "empty": torch.empty(0, 4),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "transposed": torch.randn(4, 6).T,
}


def entries() -> list[Entry]:
    return [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def test_one_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    write_tensors(tmp_path, entries(), TENSORS.__getitem__)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_NAME]
    read = load_file(tmp_path / SINGLE_NAME)
    assert read.keys() == TENSORS.keys()
    assert all(same_bits(read[name], tensor) for name, tensor in TENSORS.items())


def test_shards_read_back_by_index(tmp_path: Path) -> None:
    write_tensors(tmp_path, entries(), TENSORS.__getitem__, max_shard_bytes=40)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert len(set(index["weight_map"].values())) > 2
    assert all((tmp_path / name).exists() for name in index["weight_map"].values())
    with TensorFolder(tmp_path) as files:
        assert all(same_bits(files.read(name), tensor) for name, tensor in TENSORS.items())


def test_tensors_start_at_multiples_of_their_item_size(tmp_path: Path) -> None:
    odd = {"a": torch.ones(1, dtype=torch.bfloat16), "b": torch.ones(3)}
    write_tensors(tmp_path, [Entry(n, t.dtype, tuple(t.shape)) for n, t in odd.items()], odd.__getitem__)
    raw = (tmp_path / SINGLE_NAME).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header["b"]["data_offsets"][0] % 4 == 0


def test_values_are_cast_to_the_entry_type(tmp_path: Path) -> None:
    write_tensors(tmp_path, [Entry("w", torch.bfloat16, (3,))], lambda name: torch.tensor([1.0, 1.001, 3.14159]))
    assert torch.equal(load_file(tmp_path / SINGLE_NAME)["w"], torch.tensor([1.0, 1.001, 3.14159]).bfloat16())


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 200))
def test_shards_keep_order_and_size(sizes: list[int], limit: int) -> None:
    planned = plan_shards([Entry(str(i), torch.float32, (size,)) for i, size in enumerate(sizes)], limit)
    assert [entry.name for shard in planned for entry in shard] == [str(i) for i in range(len(sizes))]
    for shard in planned:
        assert shard
        assert len(shard) == 1 or sum(entry.num_bytes for entry in shard) <= limit


def test_folder_appears_only_when_complete(tmp_path: Path) -> None:
    goal = tmp_path / "deep" / "goal"
    with new_folder(goal) as building:
        (building / "x").write_text("1")
        assert not goal.exists()
    assert [path.name for path in goal.iterdir()] == ["x"]
    assert os.listdir(goal.parent) == ["goal"]


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "goal") as building:
        write_tensors(building, entries(), {}.__getitem__)
    assert os.listdir(tmp_path) == []


def test_folder_in_use_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "goal").mkdir()
    (tmp_path / "goal" / "mine").write_text("keep")
    with pytest.raises(ValueError, match="exists and is not an empty folder"), new_folder(tmp_path / "goal"):
        pytest.fail("must not start")
    assert (tmp_path / "goal" / "mine").read_text() == "keep"
    assert os.listdir(tmp_path) == ["goal"]


def test_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "goal").mkdir()
    with new_folder(tmp_path / "goal") as building:
        (building / "x").write_text("1")
    assert os.listdir(tmp_path / "goal") == ["x"]
