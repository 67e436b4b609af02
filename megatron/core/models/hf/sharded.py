"""From a whole Hugging Face tensor to the part of ours that this rank holds.

A slot says which rectangle of our whole tensor a Hugging Face tensor is, a sharded parameter which rectangle of it is
here. What both cover is copied, without communication; where they do not meet, the file is not even read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core.models.hf.tensor_names import Slot
from megatron.core.tensor_parallel.shards import local_part, own_region


@torch.no_grad()
def copy_into(slot: Slot, ours: Tensor, read: Callable[[], Tensor]) -> None:
    """Copy what ``read`` gives, the slot's whole tensor, into own part of ``ours``; rows behind it become zero.

    Raises:
        ValueError: a value that is not finite in our type. In a frozen indexer nothing would show it: keys are selected
            by position then, and every loss is finite.
    """
    own, region = local_part(ours), own_region(ours)[1]
    for place in slot.index:
        here, region = region[0], region[1:]
        if not here.start <= place < here.stop:
            return
        own = own[place - here.start]
    if own.numel() == 0:
        return
    if slot.rows is not None:
        kept = min(max(slot.rows - region[0].start, 0), own.shape[0])
        own[kept:].zero_()
        own, region = own[:kept], (slice(region[0].start, region[0].start + kept), *region[1:])
    if own.numel():
        own.copy_(read()[region])
        if not torch.stack(own.aminmax()).isfinite().all():  # NaN is both; makes no copy
            raise ValueError(
                f"{slot.hf} holds values that are not finite in {own.dtype}: load another copy of the weights, or a "
                "wider dtype."
            )
