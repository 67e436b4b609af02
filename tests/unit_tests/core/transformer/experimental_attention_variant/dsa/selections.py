"""Selections that some selector chose, as each layout holds them, for the tests of files of selected keys."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, selection_io
from megatron.core.transformer.experimental_attention_variant.dsa.backends.protocol import TopK

K = 5
LAYERS = (1, 4)
LENGTHS = (7, 1, 12, 4)


def truth(length: int, layer: int, document: int) -> Tensor:
    """Position ids ``[length, K]`` that some selector chose: random, ascending, then -1."""
    generator = torch.Generator().manual_seed(1000 * layer + document)
    rows = torch.full((length, K), -1, dtype=torch.int64)
    for p in range(length):
        chosen = torch.randperm(p + 1, generator=generator)[:K].sort().values
        rows[p, : chosen.numel()] = chosen
    return rows


def selection(layout: Layout, layer: int, documents: Sequence[int], lengths: Sequence[int] = LENGTHS) -> TopK:
    """What a layer holds when ``layout`` lays out ``documents``, counted by their keys."""
    ids = torch.full((layout.num_rows, K), -1, dtype=torch.int32)
    numbers = dict(zip(sorted({s.key_start for s in layout.segments}), documents, strict=True))
    for s in layout.segments:
        rows = truth(lengths[numbers[s.key_start]], layer, numbers[s.key_start])
        rows = rows[s.causal_offset : s.causal_offset + s.num_rows]
        ids[s.row_start : s.row_stop] = torch.where(rows < 0, -1, rows + s.key_start).int()
    return TopK(ids, (ids >= 0).sum(-1, dtype=torch.int32), torch.zeros(ids.shape))


def record(
    layout: Layout, documents: Sequence[int] = (0, 1, 2, 3), lengths: Sequence[int] = LENGTHS
) -> dict[int, TopK]:
    return {layer: selection(layout, layer, documents, lengths) for layer in LAYERS}


def save_shards(path: Path, parts: Sequence[tuple[dict[int, TopK], Layout]]) -> None:
    """What the first rank writes of several ranks' (record, layout), without the ranks."""
    shards = [selection_io._describe(*part) for part in parts]
    layers = sorted(parts[0][0])
    gathered = ([record[layer].indices_TK for record, _ in parts] for layer in layers)
    selection_io._write(path, shards, selection_io._documents(shards), gathered)


def offsets(lengths: Sequence[int], multiple: int = 1) -> tuple[int, ...]:
    return tuple(accumulate((-(-n // multiple) * multiple for n in lengths), initial=0))


def assert_same(loaded: dict[int, TopK], expected: dict[int, TopK]) -> None:
    assert list(loaded) == list(expected)
    for layer, topk in expected.items():
        assert loaded[layer].scores_TK is None
        assert loaded[layer].indices_TK.dtype == loaded[layer].length_T.dtype == torch.int32
        assert torch.equal(loaded[layer].indices_TK, topk.indices_TK)
        assert torch.equal(loaded[layer].length_T, topk.length_T)


PACKED = Layout.packed(offsets(LENGTHS))
PADDED = Layout.packed(offsets(LENGTHS), offsets(LENGTHS, 8))


def shards(size: int) -> list[Layout]:
    return [Layout.zigzag(offsets(LENGTHS), size, rank, offsets(LENGTHS, 2 * size)) for rank in range(size)]


def present(layout: Layout, size: int) -> list[int]:
    """Which documents a shard holds rows of."""
    starts = {s.key_start for s in layout.segments}
    return [m for m, start in enumerate(offsets(LENGTHS, 2 * size)[:-1]) if start in starts]
