"""Rows of context-parallel ranks: nothing is lost or doubled, padding has no loss, and layouts agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.transformer.experimental_attention_variant.dsa.layout import Layout, positions, valid_rows
from megatron.training.data.batch import Batch, Sample, collate
from megatron.training.data.shard import pad_offsets, shard_batch


def batch_of(samples: int, length: int, starts: list[int] | None = None) -> Batch:
    made = []
    for number in range(samples):
        tokens = 1 + number * length + np.arange(length + 1)  # token = 1 + place in the flattened batch
        mask = (np.arange(length) % 5 != 4).astype(np.float32)
        made.append(Sample(tokens[:-1], tokens[1:], mask, None if starts is None else np.array(starts)))
    return collate(made)


CASES = [
    # samples, length, starts, cp, tp
    (2, 16, None, 2, 1),
    (2, 16, None, 4, 2),
    (1, 13, None, 2, 1),  # padded at the end
    (3, 7, None, 1, 2),  # rows alone are padded
    (1, 16, [0, 3, 4, 5, 12], 2, 1),  # documents of 3, 1, 1, 7 and 4 tokens
    (2, 16, [0, 9], 4, 4),
    (1, 8, [0, 1, 2, 3, 4, 5, 6, 7], 4, 1),  # one token each: most ranks have padding alone
]


@pytest.mark.parametrize(("samples", "length", "starts", "cp", "tp"), CASES)
def test_ranks_hold_every_token_once_at_its_position(
    samples: int, length: int, starts: list[int] | None, cp: int, tp: int
) -> None:
    batch = batch_of(samples, length, starts)
    seen: list[tuple[int, int, int, float]] = []
    for rank in range(cp):
        part = shard_batch(batch, cp, rank, tp)
        assert part.tokens.shape == part.labels.shape == part.loss_mask.shape and part.tokens.numel() % tp == 0
        packed = part.packed_seq_params
        rows, width = part.tokens.shape
        offsets = padded = tuple(i * width * cp for i in range(rows + 1))
        if packed is not None:
            assert packed.offsets is not None and packed.padded_offsets is not None
            offsets, padded = packed.offsets, packed.padded_offsets
        layout = Layout.zigzag(offsets, cp, rank, padded)
        assert layout.num_rows == part.tokens.numel()
        valid = valid_rows(layout, "cpu")
        assert bool((part.loss_mask.flatten()[~valid] == 0).all() and (part.labels.flatten()[~valid] == -100).all())
        columns = part.tokens, positions(layout, "cpu"), part.labels, part.loss_mask
        seen += zip(*(column.flatten()[valid].tolist() for column in columns), strict=True)
    begins = np.array([row * length + start for row in range(samples) for start in (starts or [0])])
    for place, (token, position, label, mask) in enumerate(sorted(seen)):
        begin = begins[begins <= place].max()
        assert (token, label) == (place + 1, place + 2)
        assert position == place - begin
        assert mask == batch.loss_mask.flatten()[place]
    assert len(seen) == samples * length


def test_a_batch_that_nobody_shares_is_left_alone() -> None:
    batch = batch_of(2, 7)
    assert shard_batch(batch, 1, 0, 1) is batch
    assert shard_batch(batch, 1, 0, 2) is batch  # 14 rows divide


def test_rows_are_filled_by_an_empty_document() -> None:
    """Equal ends: the last offset repeats, the padded one does not."""
    assert pad_offsets((0, 3, 4), 1, 4) == ((0, 3, 4), (0, 3, 4))
    assert pad_offsets((0, 3, 5), 1, 4) == ((0, 3, 5, 5), (0, 3, 5, 8))
    assert pad_offsets((0, 3, 5), 2, 4) == ((0, 3, 5), (0, 4, 8))
    assert pad_offsets((0, 3), 2, 4) == ((0, 3, 3), (0, 4, 8))
    assert pad_offsets((0, 0, 5), 2, 1) == ((0, 0, 5), (0, 0, 8))


def test_every_rank_sees_as_many_pairs() -> None:
    batch = batch_of(1, 64)
    pairs = []
    for rank in range(4):
        tokens = shard_batch(batch, 4, rank, 1).tokens
        pairs.append(int(tokens.sum()))  # a token's number is the keys it sees
    assert len(set(pairs)) == 1
    assert torch.equal(shard_batch(batch, 4, 1, 1).tokens[0, :8], torch.arange(9, 17))
