"""Offsets of packed documents: read once, and refused where they are no offsets or disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams

OFFSETS = torch.tensor([0, 4, 8], dtype=torch.int32)


def test_offsets_of_tensors_are_read() -> None:
    packed = PackedSeqParams(cu_seqlens_q=OFFSETS, cu_seqlens_kv=OFFSETS.clone(), cu_seqlens_q_padded=2 * OFFSETS)
    assert packed.offsets == (0, 4, 8) and packed.padded_offsets == (0, 8, 16)
    assert PackedSeqParams.from_offsets((0, 4, 8)).offsets == (0, 4, 8)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "neither offsets nor cu_seqlens_q"),
    "other keys": (
        {"cu_seqlens_q": OFFSETS, "cu_seqlens_kv": torch.tensor([0, 1, 8])},
        "cu_seqlens_kv differs from cu_seqlens_q",
    ),
    "other padding of keys": (
        {"cu_seqlens_q": OFFSETS, "cu_seqlens_q_padded": OFFSETS, "cu_seqlens_kv_padded": 2 * OFFSETS},
        "cu_seqlens_kv_padded differs from cu_seqlens_q_padded",
    ),
    "floats": ({"cu_seqlens_q": OFFSETS.float()}, r"cu_seqlens_q is torch.float32 \[3\]"),
    "a list": ({"cu_seqlens_q": [0, 4, 8]}, "cu_seqlens_q is list"),
    "a scalar": ({"cu_seqlens_q": torch.tensor(8)}, r"cu_seqlens_q is torch.int64 \[\]"),
    "no data": ({"cu_seqlens_q": OFFSETS.to("meta")}, "that holds data"),
    "another format": ({"qkv_format": "bshd", "offsets": (0, 4)}, "qkv_format='bshd'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_offsets_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        PackedSeqParams(**fields)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
