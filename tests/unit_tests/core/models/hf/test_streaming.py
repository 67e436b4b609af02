"""Import and export hold the model and one tensor: bytes of all storages alive, watched at every tensor operation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.models.gpt import GPTModel, build_gpt_model
from megatron.core.models.hf import config_from_folder, from_pretrained, load_hf_weights, save_pretrained
from megatron.core.models.hf.tensor_folder import SINGLE_NAME, TensorFolder
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, hf_config, tensors
from tests.unit_tests.core.models.hf.test_pretrained import quantized, write_checkpoint


class MemoryWatch(TorchDispatchMode):
    """Peak bytes of the storages that operations touched and that are still alive, those of ``model`` left out."""

    def __init__(self, model: GPTModel | None = None) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in model.state_dict().values()} if model else set()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and key not in self._alive:
            self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
            self.touched += storage.nbytes()
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def largest(weights: dict[str, Tensor]) -> int:
    return max(tensor.nbytes for tensor in weights.values())


def total(weights: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("name", NAMES)
def test_import_holds_one_tensor(name: str) -> None:
    model = build_gpt_model(config_from_folder(FIXTURES / name))
    with MemoryWatch(model) as watch:
        load_hf_weights(model, FIXTURES / name)
    assert watch.touched >= total(tensors(name, "model"))
    assert watch.peak <= largest(tensors(name, "model"))


def test_fp8_import_holds_one_tensor_and_its_dequantized_copy(tmp_path: Path) -> None:
    name = "c_v32_yarn"
    stored, meant = quantized(name, (16, 24))
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    config = hf_config(name) | {"quantization_config": quantization}
    folder = write_checkpoint(tmp_path / "in", config, {key: value.contiguous() for key, value in stored.items()})
    model = build_gpt_model(config_from_folder(folder))
    with MemoryWatch(model) as watch:
        load_hf_weights(model, folder)
    assert watch.peak <= 1.5 * largest(meant)


def test_building_from_a_folder_allocates_the_model_once() -> None:
    with MemoryWatch() as watch:
        model = from_pretrained(FIXTURES / "a_glm_plain")
    bytes_of_model = total(dict(model.named_parameters()) | dict(model.named_buffers()))
    assert bytes_of_model <= watch.peak <= bytes_of_model + largest(tensors("a_glm_plain", "model"))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 100_000])
@pytest.mark.parametrize("name", NAMES)
def test_export_holds_one_tensor(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = from_pretrained(FIXTURES / name)
    with MemoryWatch(model) as watch:
        save_pretrained(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert watch.peak <= largest(tensors(name, "model"))


def test_export_that_casts_holds_one_tensor(tmp_path: Path) -> None:
    """Weights that the optimizer keeps in FP32 are written in the model's BF16, one at a time."""
    model = from_pretrained(FIXTURES / "a_glm_plain", dtype=torch.bfloat16).float()
    with MemoryWatch(model) as watch:
        save_pretrained(model, tmp_path / "out")
    assert 0 < watch.peak <= largest(tensors("a_glm_plain", "model")) / 2
    with TensorFolder(tmp_path / "out") as files:
        assert files.read("model.norm.weight").dtype == torch.bfloat16


def read_at_once(folder: Path, use: Callable[[dict[str, Tensor]], None]) -> None:
    with TensorFolder(folder) as files:
        use({name: files.read(name) + 0 for name in files.shapes})


def test_the_watch_sees_tensors_that_are_kept(tmp_path: Path) -> None:
    weights = tensors("a_glm_plain", "model")
    save_file(weights, tmp_path / SINGLE_NAME)
    with MemoryWatch() as watch:
        read_at_once(tmp_path, lambda kept: None)
    assert watch.peak > 0.9 * total(weights)
