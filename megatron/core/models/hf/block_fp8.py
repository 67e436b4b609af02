"""FP8 weights of hub checkpoints: E4M3 values with one FP32 scale for each block of 128 x 128.

The scale tensor is called ``weight_scale_inv``, yet it is multiplied: ``weight = values * scale``. Blocks at the right
and lower edge may be cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

SCALE_SUFFIX = "_scale_inv"
FP8_DTYPES = frozenset({"F8_E4M3"})


def block_shape(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block by config.json's ``quantization_config``; None for an unquantized checkpoint.

    Raises:
        ValueError: a quantization other than E4M3 in two-dimensional blocks.
    """
    quantization = hf.get("quantization_config")
    if quantization is None:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    form = quantization.get("fmt", "e4m3")
    if method != "fp8" or form != "e4m3" or not _is_block(block):
        raise ValueError(
            f"quantization_config has quant_method={method!r}, fmt={form!r}, weight_block_size={block!r}: only fp8 "
            "e4m3 in [rows, columns] blocks can be read; use the unquantized checkpoint."
        )
    return int(block[0]), int(block[1])


def _is_block(block: object) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)


def scale_shape(weight_shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scale tensor of a weight ``[rows, columns]``."""
    return tuple(-(-size // step) for size, step in zip(weight_shape, block, strict=True))


def dequantize(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """FP32 weight ``[rows, columns]`` of E4M3 ``values`` and one ``scale`` a block.

    Works block row by block row inside the result, so it needs no second copy of the weight.
    """
    rows, columns = block
    weight = values.to(torch.float32)
    for index, scale_row in enumerate(scale.to(torch.float32)):
        weight[index * rows : (index + 1) * rows] *= scale_row.repeat_interleave(columns)[: weight.shape[1]]
    return weight
