"""Time the quantization kernel: `python -m tests.performance_tests.dsa.bench_quantize`, Markdown on stdout.

A case is timed only after its bytes equal those of the PyTorch version on the CPU. GB/s counts what must move: the
input once, a byte a value and four a vector out. "share" is that over the card's measured copy rate; the last column is
the same work in PyTorch on the device.
"""

import torch

from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn.quantize import quantize_e4m3
from megatron.core.transformer.experimental_attention_variant.dsa.quantization import quantize_e4m3 as plain

from .timing import milliseconds

HEAD_DIM = 128
CASES = [(8192, 64), (32768, 64), (32768, 32), (65536,)]
COPY_BYTES = 2**31


def copy_rate() -> float:
    """Bytes a second, read plus written, of a large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / milliseconds(lambda: target.copy_(source), repeats=9) * 1e3


def measure(shape: tuple[int, ...], dtype: torch.dtype, scale_format: str, ceiling: float) -> str:
    """One row of the table, without times where the bytes are wrong."""
    x = torch.randn(*shape, HEAD_DIM, device="cuda").to(dtype)
    made, expected = quantize_e4m3(x, scale_format), plain(x.cpu(), scale_format)
    same = torch.equal(made.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
    head = f"| {list(shape)} | {str(dtype).removeprefix('torch.')} | {scale_format} |"
    if not same or not torch.equal(made.scale.cpu(), expected.scale):
        return f"{head} bytes differ | | | |"
    time = milliseconds(lambda: quantize_e4m3(x, scale_format), repeats=21)
    torch_time = milliseconds(lambda: plain(x, scale_format), repeats=5)
    rate = (x.nbytes + made.values.nbytes + made.scale.nbytes) / time * 1e3
    return f"{head} {time:.3f} | {rate / 1e9:.0f} | {rate / ceiling:.0%} | {torch_time:.3f} |"


def main() -> None:
    ceiling = copy_rate()
    print(f"{torch.cuda.get_device_name()}, a copy moves {ceiling / 1e9:.0f} GB/s\n")
    print("| vectors | dtype | scales | ms | GB/s | share | PyTorch ms |\n|---|---|---|--:|--:|--:|--:|")
    for shape in CASES:
        for dtype in (torch.bfloat16, torch.float32):
            for scale_format in ("ue8m0", "fp32"):
                print(measure(shape, dtype, scale_format, ceiling), flush=True)


if __name__ == "__main__":
    main()
