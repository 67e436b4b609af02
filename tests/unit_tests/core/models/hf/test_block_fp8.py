"""Block dequantization against one scale lookup per element."""

import pytest
import torch

from megatron.core.models.hf.block_fp8 import block_shape, dequantize, scale_shape


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 100), (256, 129)])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_every_element_gets_the_scale_of_its_block(shape: tuple[int, int], block: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape(shape, block), generator=generator) + 0.5
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    expected = values.to(torch.float32) * scale[rows][:, columns]
    weight = dequantize(values, scale, block)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, expected)


def test_block_shape_of_hub_configs() -> None:
    hub = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert block_shape({"quantization_config": hub}) == (128, 128)
    assert block_shape({}) is None
    assert block_shape({"quantization_config": None}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"quant_method": "awq"},
        {"fmt": "e5m2"},
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": ["a", "b"]},
    ],
)
def test_other_quantizations_are_refused(change: dict) -> None:
    hub = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    with pytest.raises(ValueError, match=str(next(iter(change.values()))).replace("[", "\\[").replace("]", "\\]")):
        block_shape({"quantization_config": hub | change})
