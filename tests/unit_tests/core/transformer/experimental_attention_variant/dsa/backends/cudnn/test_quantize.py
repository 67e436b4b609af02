"""The Triton quantization kernel gives the PyTorch version's bytes: golden files, random data, every mantissa."""

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa.quantization import Quantized, quantize_e4m3

from ...golden_fp8 import FINITE, bits, golden

pytestmark = pytest.mark.gpu


def kernel(x: Tensor, scale_format: str = "ue8m0", checked: bool = False) -> Quantized:
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import quantize

    return quantize.quantize_e4m3(x, scale_format, checked)


def assert_same_bytes(made: Quantized, expected: Quantized) -> None:
    assert made.values.dtype == torch.float8_e4m3fn and made.scale.dtype == torch.float32
    assert torch.equal(bits(made.values).cpu(), bits(expected.values))
    assert torch.equal(bits(made.scale).cpu(), bits(expected.scale))


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("number", [*FINITE, "12"])
def test_golden_files(number: str, name: str, scale_format: str) -> None:
    x = golden(number)[name]
    made, expected = kernel(x.cuda(), scale_format), quantize_e4m3(x, scale_format)
    assert_same_bytes(made, expected)
    assert_same_bytes(quantize_e4m3(x.cuda(), scale_format), expected)
    if scale_format == "ue8m0":
        assert torch.equal(bits(made.values).cpu(), golden(number)[f"{name}_fp8"])
        assert torch.equal(bits(made.scale).cpu(), bits(golden(number)[f"{name}_scale"]))


SHAPES = [(1, 128), (31, 128), (33, 128), (37, 3, 128), (4097, 32, 128), (5, 64), (7, 2, 256)]


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_values_of_all_magnitudes(shape: tuple[int, ...], dtype: torch.dtype, scale_format: str) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    spread = 12 if dtype == torch.float16 else 120
    exponents = torch.randint(-spread, spread, (*shape[:-1], 1), generator=generator)
    x = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    x[..., 0] = -0.0
    x.view(-1, shape[-1])[0] = 0.0
    x.view(-1, shape[-1])[-1, 1] = torch.nan
    x = x.to(dtype)
    assert_same_bytes(kernel(x.cuda(), scale_format), quantize_e4m3(x, scale_format))


@pytest.mark.parametrize("scale_format", ["ue8m0", "fp32"])
@pytest.mark.parametrize("octave", [-14, 0, 37])
def test_every_mantissa_as_the_maximum(octave: int, scale_format: str) -> None:
    values = (torch.arange(2**23, dtype=torch.int32) + ((octave + 127) << 23)).view(torch.float32)
    x = torch.stack((values, -0.37 * values), dim=-1)
    assert_same_bytes(kernel(x.cuda(), scale_format), quantize_e4m3(x, scale_format))


def test_strided_input_and_no_input() -> None:
    x = golden("08")["q"]
    assert_same_bytes(kernel(x.cuda().transpose(0, 1)), quantize_e4m3(x.transpose(0, 1)))
    assert kernel(torch.empty(0, 32, 128, device="cuda")).scale.shape == (0, 32)


def test_the_checked_mode_raises() -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        kernel(golden("12")["q"].cuda(), checked=True)
    kernel(golden("08")["q"].cuda(), checked=True)
    with pytest.raises(ValueError, match="'fp16' is unknown"):
        kernel(golden("08")["q"].cuda(), "fp16")
