"""The Triton kernels against the plain PyTorch that stands in for them in the emulator."""

import pytest
import torch

from .. import emulator

pytestmark = pytest.mark.gpu
FLOOR = -100.0


def lengths(rows: int, columns: int) -> torch.Tensor:
    length = torch.randint(0, columns + 1, (rows,), dtype=torch.int32, device="cuda")
    length[:3] = torch.tensor([0, 1, columns])
    return length


@pytest.mark.parametrize(("rows", "columns"), [(33, 1), (333, 705), (64, 2048), (40, 5003)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
def test_row_kernels(rows: int, columns: int, spread: float) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import triton_rows

    torch.manual_seed(0)
    length = lengths(rows, columns)
    past = torch.arange(columns, device="cuda") >= length[:, None]
    target = torch.rand(rows, columns, device="cuda").masked_fill(past, torch.nan)
    scores = (torch.randn(rows, columns, device="cuda") * spread).masked_fill(past, torch.nan)
    got = triton_rows.kl_rows(target, scores, length, FLOOR)
    for mine, theirs in zip(got, emulator.kl_rows(target, scores, length, FLOOR), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    stats = (length, *got[1:])
    width = -(-columns // 128) * 128
    for mine, theirs in zip(
        triton_rows.backward_rows(target, scores, stats, width, FLOOR),
        emulator.backward_rows(target, scores, stats, width, FLOOR),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7) and torch.equal(mine < 0, theirs < 0)


@pytest.mark.parametrize(
    ("rows", "heads", "offset"), [(1, 96, 0), (37, 64, 163), (300, 16, 0), (65, 128, 3), (9, 1, 40)]
)
@pytest.mark.parametrize("width", [512, 576])
def test_visible_lse(rows: int, heads: int, offset: int, width: int) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa.backends.cudnn import triton_lse

    torch.manual_seed(0)
    q = torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(rows + offset, width, device="cuda", dtype=torch.bfloat16)
    for scale in (width**-0.5, 3.0):
        mine = triton_lse.visible_lse(q, kv, scale, offset)
        assert torch.allclose(mine, emulator.visible_lse(q, kv, scale, offset), rtol=1e-5, atol=1e-4)
