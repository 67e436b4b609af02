"""E4M3 quantization of indexer operands in one Triton kernel: each value is read once and written once.

The bytes are those of ``quantization.quantize_e4m3``, whose docstring states the rule; here it is spelt for the device:

- the maximum is taken over bit patterns as integers, where NaN and infinity order above every number, so that one
  comparison tells whether a vector is finite;
- dividing by a power of two is multiplying by its reciprocal, which is as exact and needs no division; plain scales
  divide with IEEE rounding, since Triton's own operator is approximate;
- a vector that is not finite gets the factor NaN, which makes every code NaN.

Importing this module needs Triton; running it needs a device that converts to E4M3 (SM 8.9 or newer).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...quantization import Quantized, require_finite, require_format

VECTORS = 32
WARPS = 4


def quantize_e4m3(x: Tensor, scale_format: str = "ue8m0", checked: bool = False) -> Quantized:
    """``quantization.quantize_e4m3`` on the device; the last dimension must be a power of two.

    Raises:
        ValueError: an unknown format, or, in the checked mode, NaN or infinity.
    """
    require_format(scale_format)
    vectors = x.detach().reshape(-1, x.shape[-1]).contiguous()
    count, width = vectors.shape
    assert width & (width - 1) == 0, "the backend takes one head width, 128"
    codes = torch.empty(vectors.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        _quantize_kernel[(triton.cdiv(count, VECTORS),)](
            vectors, codes, scale, count, WIDTH=width, ROWS=VECTORS, UE8M0=scale_format == "ue8m0", num_warps=WARPS
        )
    if checked:
        require_finite(scale)
    return Quantized(codes.view(x.shape), scale.view(x.shape[:-1]))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x, codes, scales, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, UE8M0: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < count
    places = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + places, mask=inside[:, None], other=0.0).to(tl.float32)
    peak = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = peak < 0x7F800000
    amax = tl.maximum(peak.to(tl.float32, bitcast=True), 1e-4)
    if UE8M0:
        bits = (amax * 0.002232142857142857).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax, tl.full((ROWS,), 448.0, tl.float32))
        factor = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), scale)
    scale = tl.where(finite, scale, float("nan"))
    factor = tl.where(finite, factor, float("nan"))
    tl.store(codes + places, (values * factor[:, None]).to(tl.float8e4nv), mask=inside[:, None])
    tl.store(scales + rows, scale, mask=inside)
