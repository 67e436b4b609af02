"""Packed sequences (THD): which documents one row of tokens holds.

Megatron's fields, and host copies of the offsets beside them: everything that decides shapes, launches or loops reads
the host copy, so that no layer synchronizes the device. Real lengths (``offsets``) and padded positions
(``padded_offsets``) are kept apart; rows between a document's end and the next padded offset are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PackedSeqParams:
    """Offsets of the documents in one packed row.

    ``cu_seqlens_*`` are int32 ``[documents + 1]`` cumulative token counts, real or padded. ``offsets`` and
    ``padded_offsets`` are the same numbers on the host; give them, or the tensors are read once (a device sync).
    Documents attend to themselves, so queries and keys have the same offsets.

    Raises:
        ValueError: no offsets, offsets that are no list of integers, or other ones for keys than for queries.
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    offsets: tuple[int, ...] | None = None
    padded_offsets: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.qkv_format != "thd":
            raise ValueError(
                f"qkv_format={self.qkv_format!r} was given, but packed sequences are 'thd'; for plain batches pass "
                "packed_seq_params=None."
            )
        if self.offsets is None:
            if self.cu_seqlens_q is None:
                raise ValueError("PackedSeqParams got neither offsets nor cu_seqlens_q: give the documents' offsets.")
            self.offsets = _read("cu_seqlens_q", self.cu_seqlens_q, "cu_seqlens_kv", self.cu_seqlens_kv)
        if self.padded_offsets is None and self.cu_seqlens_q_padded is not None:
            named = "cu_seqlens_q_padded", self.cu_seqlens_q_padded, "cu_seqlens_kv_padded", self.cu_seqlens_kv_padded
            self.padded_offsets = _read(*named)

    @classmethod
    def from_offsets(
        cls,
        offsets: Sequence[int],
        padded_offsets: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedSeqParams:
        """Build from host integers: cumulative real lengths and, where rows are padded, cumulative padded lengths."""
        real = torch.tensor(offsets, dtype=torch.int32, device=device)
        padded = None if padded_offsets is None else torch.tensor(padded_offsets, dtype=torch.int32, device=device)
        longest = max((b - a for a, b in zip(offsets, offsets[1:], strict=False)), default=0)
        return cls(
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            offsets=tuple(offsets),
            padded_offsets=None if padded_offsets is None else tuple(padded_offsets),
        )


def _read(name: str, offsets: Tensor, key_name: str, key_offsets: Tensor | None) -> tuple[int, ...]:
    for what, tensor in ((name, offsets), (key_name, key_offsets)):
        if tensor is None:
            continue
        is_list = isinstance(tensor, Tensor) and tensor.dim() == 1 and not tensor.is_meta
        if not is_list or tensor.is_floating_point() or tensor.dtype == torch.bool:
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{what} is {found}, but the documents' offsets are a 1-d integer tensor that holds data: give "
                "cumulative token counts, or host integers by PackedSeqParams.from_offsets."
            )
    values = tuple(offsets.tolist())
    if key_offsets is not None and key_offsets is not offsets and tuple(key_offsets.tolist()) != values:
        raise ValueError(
            f"{key_name} differs from {name}, but documents attend to themselves: give both the same offsets."
        )
    return values
