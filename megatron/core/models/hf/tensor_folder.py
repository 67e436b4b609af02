"""Reading a folder of safetensors files one tensor at a time.

All names and shapes are known from the files' headers, so a checkpoint is checked whole before a byte of weights is
read. One file is open at a time: its mapping goes away with it, and memory holds the tensor in hand and nothing else.
FP8 weights and their scales, which may lie in different files, appear as one dequantized tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.core.models.hf.block_fp8 import FP8_DTYPES, SCALE_SUFFIX, dequantize, scale_shape

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file is absent, not JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: give the folder of a Hugging Face checkpoint.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): copy the checkpoint again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object: copy the checkpoint again.")
    return content


class TensorFolder:
    """The tensors of a checkpoint folder (one model.safetensors, or shards with an index).

    Args:
        folder: the checkpoint folder.
        block: rows and columns of an FP8 block, None if the checkpoint is not quantized.

    Raises:
        ValueError: no safetensors files, shards missing or damaged, an index that disagrees with its shards, or FP8
            weights whose scales are missing or of a wrong shape; each with every name concerned.
    """

    def __init__(self, folder: Path, block: tuple[int, int] | None = None) -> None:
        self._folder = folder
        self._block = block
        self._file: Any = None
        self._file_name = ""
        index = read_json(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else None
        self._headers: dict[str, tuple[str, str, tuple[int, ...]]] = {}
        for file_name in self._file_names(index):
            self._read_header(file_name)
        if index is not None:
            self._check_index(index["weight_map"])
        self._scales = {name for name in self._headers if name.endswith(SCALE_SUFFIX)}
        self._check_types()
        self._close()

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor; FP8 scales are part of their weight and not listed."""
        return {name: shape for name, (_, _, shape) in self._headers.items() if name not in self._scales}

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor; reading in this order opens every file once."""
        return self._headers[name][0]

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU; FP8 weights come dequantized to FP32."""
        tensor = self._read_stored(name)
        if name + SCALE_SUFFIX not in self._scales:
            return tensor
        assert self._block is not None
        return dequantize(tensor, self._read_stored(name + SCALE_SUFFIX), self._block)

    def _read_stored(self, name: str) -> torch.Tensor:
        return self._open(self._headers[name][0]).get_tensor(name)

    def _open(self, file_name: str) -> Any:
        if self._file_name != file_name:
            self._close()
            try:
                self._file = safe_open(self._folder / file_name, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self._folder / file_name} is no readable safetensors file ({error}): copy the checkpoint again."
                ) from None
            self._file_name = file_name
        return self._file

    def _close(self) -> None:
        self._file, self._file_name = None, ""

    def _file_names(self, index: dict[str, Any] | None) -> list[str]:
        if index is None:
            if not (self._folder / SINGLE_NAME).exists():
                raise ValueError(
                    f"{self._folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors checkpoints can be "
                    "read; give the folder of one, or convert it."
                )
            return [SINGLE_NAME]
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(
                f"{self._folder / INDEX_NAME} has no weight_map from tensor names to file names: copy the checkpoint "
                "again."
            )
        names = sorted(set(places.values()))
        missing = [name for name in names if Path(name).name != name or not (self._folder / name).exists()]
        if missing or not names:
            raise ValueError(
                f"{self._folder / INDEX_NAME} names {len(names)} files, of which {missing} are missing: complete the "
                "download."
            )
        return names

    def _read_header(self, file_name: str) -> None:
        file = self._open(file_name)
        for name in file.keys():  # noqa: SIM118 (no mapping)
            part = file.get_slice(name)
            if name in self._headers:
                raise ValueError(f"{name} is in {self._headers[name][0]} and in {file_name}: remove the stale file.")
            self._headers[name] = (file_name, part.get_dtype(), tuple(part.get_shape()))

    def _check_index(self, weight_map: dict[str, str]) -> None:
        stored = {name: file_name for name, (file_name, _, _) in self._headers.items()}
        wrong = sorted(name for name in stored.keys() | weight_map.keys() if stored.get(name) != weight_map.get(name))
        if wrong:
            raise ValueError(
                f"{INDEX_NAME} and the shards in {self._folder} disagree about {len(wrong)} tensors, so the folder "
                f"mixes two checkpoints: copy it again. They are: {', '.join(wrong)}"
            )

    def _check_types(self) -> None:
        """Every tensor is a plain float, or FP8 with a scale that fits."""
        wrong = []
        for name, (_, dtype, shape) in self._headers.items():
            if dtype not in FP8_DTYPES | _PLAIN_DTYPES and name not in self._scales:
                wrong.append(f"{name} (of type {dtype})")
            if dtype in FP8_DTYPES:
                scale = self._headers.get(name + SCALE_SUFFIX)
                expected = scale_shape(shape, self._block) if self._block and len(shape) == 2 else None
                if scale is None or scale[2] != expected:
                    wrong.append(f"{name} (scale {None if scale is None else scale[2]}, needs {expected})")
        for name in self._scales:
            weight = self._headers.get(name.removesuffix(SCALE_SUFFIX))
            if weight is None or weight[1] not in FP8_DTYPES:
                wrong.append(f"{name} (no FP8 weight of that name)")
        if wrong:
            raise ValueError(
                f"{len(wrong)} tensors in {self._folder} are no weights in FP32, FP16, BF16 or E4M3 with block scales "
                f"(config.json: weight_block_size={self._block}): complete the checkpoint, or take one in those types. "
                f"They are: {', '.join(sorted(wrong))}"
            )
