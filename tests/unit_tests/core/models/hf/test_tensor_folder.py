"""Reading shards: what is in them, FP8 pairs across files, and damage of every kind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.models.hf.block_fp8 import dequantize
from megatron.core.models.hf.tensor_folder import INDEX_NAME, SINGLE_NAME, TensorFolder, read_json

BLOCK = (128, 128)


def write_shards(folder: Path, *shards: dict[str, torch.Tensor]) -> None:
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"shard-{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"shard-{number}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def fp8_pair(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return values, torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5


def test_single_file(tmp_path: Path) -> None:
    stored = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0).bfloat16()}
    save_file(stored, tmp_path / SINGLE_NAME)
    with TensorFolder(tmp_path) as files:
        assert files.shapes == {"a": (2, 3), "b": (4,)}
        assert all(torch.equal(files.read(name), tensor) for name, tensor in stored.items())
        assert files.read("b").dtype == torch.bfloat16


def test_shards_in_any_order(tmp_path: Path) -> None:
    stored = [{"a": torch.ones(2), "c": torch.ones(3) * 3}, {"b": torch.ones(4) * 2}]
    write_shards(tmp_path, *stored)
    with TensorFolder(tmp_path) as files:
        for name in "bacab":
            assert torch.equal(files.read(name), (stored[0] | stored[1])[name])
        assert files.file_of("b") == "shard-1.safetensors"


def test_fp8_weight_and_scale_in_different_files(tmp_path: Path) -> None:
    values, scale = fp8_pair(130, 200)
    write_shards(tmp_path, {"w.weight": values}, {"w.weight_scale_inv": scale, "v": torch.ones(1)})
    with TensorFolder(tmp_path, BLOCK) as files:
        assert files.shapes == {"w.weight": (130, 200), "v": (1,)}
        assert torch.equal(files.read("w.weight"), dequantize(values, scale, BLOCK))


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"holds neither {SINGLE_NAME} nor {INDEX_NAME}"):
        TensorFolder(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    (tmp_path / "shard-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"\['shard-1.safetensors'\] are missing"):
        TensorFolder(tmp_path)


def test_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE_NAME)
    (tmp_path / "inside" / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": f"../{SINGLE_NAME}"}}))
    with pytest.raises(ValueError, match="are missing"):
        TensorFolder(tmp_path / "inside")


def test_truncated_shard(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / SINGLE_NAME)
    whole = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="is no readable safetensors file"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize("places", [None, "x", ["x"], 3, {"a": 1}, {"a": ["x"]}, {"a": None}])
def test_an_index_of_other_types_is_named(places: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=f"{INDEX_NAME} has no weight_map from tensor names to file names: copy"):
        TensorFolder(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    del index["weight_map"]["a"]
    index["weight_map"]["ghost"] = "shard-0.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="disagree about 2 tensors.*a, ghost"):
        TensorFolder(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    index = {"weight_map": {"a": "shard-0.safetensors", "b": "shard-1.safetensors"}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a is in shard-0.safetensors and in shard-1.safetensors"):
        TensorFolder(tmp_path)


def test_every_tensor_of_a_wrong_type_is_listed(tmp_path: Path) -> None:
    values, scale = fp8_pair(130, 200)
    stored = {
        "no_scale": values,
        "small_scale": values.clone(),
        "small_scale_scale_inv": scale[:1].clone(),
        "plain": torch.ones(2, 2),
        "plain_scale_inv": scale.clone(),
        "integers": torch.ones(2, dtype=torch.int32),
        "good": torch.ones(2),
    }
    save_file(stored, tmp_path / SINGLE_NAME)
    with pytest.raises(ValueError, match="4 tensors") as refusal:
        TensorFolder(tmp_path, BLOCK)
    message = str(refusal.value)
    for name in ("no_scale (scale None", "small_scale (scale (1, 2), needs (2, 2))", "plain_scale_inv", "integers"):
        assert name in message
    assert "good" not in message


def test_fp8_without_a_quantization_config(tmp_path: Path) -> None:
    values, scale = fp8_pair(4, 4)
    save_file({"w": values, "w_scale_inv": scale}, tmp_path / SINGLE_NAME)
    with pytest.raises(ValueError, match="weight_block_size=None"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("{", "cannot be read as JSON"), ("[1]", "holds a list"), (b"\xff", "cannot be read")],
)
def test_bad_json(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_json(path)
