"""Layouts against brute force: who sees what, token by token, for every way of laying documents out.

The oracle lists the tokens of all documents in padded order, deals them to context-parallel ranks chunk by chunk, and
gives each real token the keys of its document up to itself. Whatever the layout says is compared with that list.
Faults of this kind that others had: per-row visible-key counts of zigzag shards, offsets that changed meaning from
bottom-right to top-left, lengths that did not match clipped keys.
"""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer.experimental_attention_variant.dsa import Layout, Segment, row_bounds
from megatron.core.transformer.experimental_attention_variant.dsa import layout as layout_module
from megatron.core.transformer.experimental_attention_variant.dsa.layout import (
    positions,
    valid_rows,
    visible_keys,
    zigzag_key_order,
)


class Documents(NamedTuple):
    """Real and padded lengths."""

    lengths: list[int]
    padded: list[int]

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))

    @property
    def padded_offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.padded))


class Row(NamedTuple):
    """One row of a rank; ``keys`` is empty on padding."""

    document: int
    position: int
    keys: range


def brute_force(documents: Documents, cp_size: int, cp_rank: int) -> list[Row]:
    rows = []
    first_key = 0
    for number, (length, padded) in enumerate(zip(*documents, strict=True)):
        chunk = padded // (2 * cp_size)
        for position in range(padded):
            owner = 0 if cp_size == 1 else min(position // chunk, 2 * cp_size - 1 - position // chunk)
            keys = range(first_key, first_key + position + 1) if position < length else range(0)
            if owner == cp_rank:
                rows.append(Row(number, position, keys))
        first_key += padded
    return rows


def visible_of(layout: Layout) -> list[set[int]]:
    starts, ends = row_bounds(layout, "cpu")
    return [set(range(a, b)) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


@st.composite
def documents_for(draw: st.DrawFn, cp_size: int, pad: bool = True) -> Documents:
    lengths = draw(st.lists(st.integers(0, 2 * cp_size + 9), max_size=5))
    multiple = 2 * cp_size if cp_size > 1 else 1
    padded = []
    for length in lengths:
        extra = draw(st.integers(0, 2)) if pad else 0
        padded.append((-(-length // multiple) + extra) * multiple)
    return Documents(lengths, padded)


@st.composite
def shards(draw: st.DrawFn) -> tuple[Documents, int, int]:
    cp_size = draw(st.integers(1, 8))
    return draw(documents_for(cp_size)), cp_size, draw(st.integers(0, cp_size - 1))


def layout_of(documents: Documents, cp_size: int, cp_rank: int) -> Layout:
    return Layout.zigzag(documents.offsets, cp_size, cp_rank, documents.padded_offsets)


@given(shards())
def test_every_row_sees_its_document_up_to_itself(shard: tuple[Documents, int, int]) -> None:
    layout, expected = layout_of(*shard), brute_force(*shard)
    assert visible_of(layout) == [set(row.keys) for row in expected]
    assert layout.num_keys == shard[0].padded_offsets[-1]
    assert layout.num_rows * shard[1] == layout.num_keys


@given(shards())
def test_views_follow_from_the_rows(shard: tuple[Documents, int, int]) -> None:
    layout, expected = layout_of(*shard), brute_force(*shard)
    starts, ends = row_bounds(layout, "cpu")
    assert starts.dtype == ends.dtype == torch.int32
    assert torch.equal(starts == ends, ~valid_rows(layout, "cpu"))
    assert valid_rows(layout, "cpu").tolist() == [bool(row.keys) for row in expected]
    assert layout.num_valid_rows == sum(bool(row.keys) for row in expected)
    assert positions(layout, "cpu").dtype == torch.int64
    assert positions(layout, "cpu").tolist() == [row.position if row.keys else 0 for row in expected]
    seen = set().union(*(row.keys for row in expected))
    assert set(visible_keys(layout, "cpu").nonzero().flatten().tolist()) == seen
    assert len(visible_keys(layout, "cpu")) == layout.num_keys
    assert layout.key_range == ((min(seen), max(seen) + 1) if seen else (0, 0))


@given(st.data(), st.integers(1, 8))
def test_the_ranks_together_hold_every_row_once(data: st.DataObject, cp_size: int) -> None:
    documents = data.draw(documents_for(cp_size))
    seen = []
    for rank in range(cp_size):
        layout = layout_of(documents, cp_size, rank)
        ends, valid = row_bounds(layout, "cpu")[1], valid_rows(layout, "cpu")
        seen += (ends[valid] - 1).tolist()  # the last key that a row sees is the row's own
    whole = Layout.packed(documents.offsets, documents.padded_offsets)
    own = row_bounds(whole, "cpu")[1][valid_rows(whole, "cpu")] - 1
    assert sorted(seen) == own.tolist()


@given(st.data(), st.integers(2, 8))
def test_gathered_keys_are_put_in_order(data: st.DataObject, cp_size: int) -> None:
    """Keys gathered over ranks come rank after rank; the order sorts them, and its inverse deals them out again."""
    documents = data.draw(documents_for(cp_size))
    first = documents.padded_offsets
    dealt = [
        first[row.document] + row.position for rank in range(cp_size) for row in brute_force(documents, cp_size, rank)
    ]
    permutation = zigzag_key_order(first, cp_size, "cpu")
    assert permutation is not None
    order, inverse = permutation
    assert torch.tensor(dealt, dtype=torch.int64)[order].tolist() == list(range(first[-1]))
    assert inverse.tolist() == dealt and zigzag_key_order(list(first), cp_size, "cpu")[0] is order


def test_one_rank_needs_no_order() -> None:
    assert zigzag_key_order((0, 5, 12), 1, "cpu") is None


def test_keys_may_come_in_another_order_than_rows() -> None:
    layout = Layout(4, 9, (Segment(0, 2, 5, 1), Segment(2, 4, 1, 0)))
    assert visible_of(layout) == [{5, 6}, {5, 6, 7}, {1}, {1, 2}]
    assert layout.key_range == (1, 8)


@given(shards(), st.data())
def test_slices_of_slices_keep_what_rows_see(shard: tuple[Documents, int, int], data: st.DataObject) -> None:
    layout, expected = layout_of(*shard), visible_of(layout_of(*shard))
    for _ in range(3):
        start = data.draw(st.integers(0, layout.num_rows))
        stop = data.draw(st.integers(start, layout.num_rows))
        layout, expected = layout.slice_rows(start, stop), expected[start:stop]
        assert layout.num_rows == len(expected) and layout.num_keys == shard[0].padded_offsets[-1]
        assert visible_of(layout) == expected


@given(shards(), st.data())
def test_slicing_twice_is_slicing_once(shard: tuple[Documents, int, int], data: st.DataObject) -> None:
    layout = layout_of(*shard)
    start = data.draw(st.integers(0, layout.num_rows))
    stop = data.draw(st.integers(start, layout.num_rows))
    low = data.draw(st.integers(0, stop - start))
    twice = layout.slice_rows(start, stop).slice_rows(low, stop - start)
    assert twice == layout.slice_rows(start + low, stop)
    assert hash(twice) == hash(layout.slice_rows(start + low, stop))


@given(st.integers(0, 4), st.integers(0, 7))
def test_a_batch_is_equal_documents(batch: int, length: int) -> None:
    layout = Layout.causal(batch, length)
    assert layout == Layout.packed(tuple(range(0, batch * length + 1, length)) if length else (0,))
    assert visible_of(layout) == [
        set(range(b * length, b * length + i + 1)) for b in range(batch) for i in range(length)
    ]


def test_one_rank_holds_whole_documents() -> None:
    assert Layout.zigzag((0, 5, 12), 1, 0, (0, 8, 16)) == Layout.packed((0, 5, 12), padded_offsets=(0, 8, 16))
    assert Layout.packed((0, 5, 12), padded_offsets=(0, 8, 16)).segments == (Segment(0, 5, 0, 0), Segment(8, 15, 8, 0))


def test_a_chunk_of_one_row() -> None:
    layouts = [Layout.zigzag((0, 16), 8, rank) for rank in range(8)]
    assert [positions(layout, "cpu").tolist() for layout in layouts] == [[r, 15 - r] for r in range(8)]


def test_all_padding_is_a_layout() -> None:
    layout = Layout.packed((0, 0, 0), padded_offsets=(0, 4, 6))
    assert layout == Layout(6, 6, ()) and visible_of(layout) == [set()] * 6
    assert layout.key_range == (0, 0) and layout.num_valid_rows == 0


def test_offsets_may_be_a_list_and_the_layout_is_still_hashable() -> None:
    layout = Layout.packed([0, 5, 12], padded_offsets=[0, 8, 16])
    assert {layout: 1}[Layout.packed((0, 5, 12), (0, 8, 16))] == 1
    with pytest.raises(FrozenInstanceError):
        layout.num_rows = 3  # type: ignore[misc]


REFUSED_LAYOUTS = {
    "overlap": ((4, 4, (Segment(0, 3, 0, 0), Segment(2, 4, 0, 0))), "overlaps or precedes"),
    "disorder": ((4, 4, (Segment(2, 4, 0, 0), Segment(0, 2, 0, 0))), "overlaps or precedes"),
    "empty segment": ((4, 4, (Segment(1, 1, 0, 0),)), "is empty"),
    "backward segment": ((4, 4, (Segment(3, 1, 0, 0),)), "is empty"),
    "negative row": ((4, 4, (Segment(-1, 1, 0, 0),)), "overlaps or precedes"),
    "keys past the end": ((4, 4, (Segment(0, 3, 2, 0),)), r"outside \[0, 4\)"),
    "offset past the end": ((4, 4, (Segment(0, 2, 0, 3),)), r"outside \[0, 4\)"),
    "negative key": ((4, 4, (Segment(0, 2, -1, 0),)), r"outside \[0, 4\)"),
    "negative offset": ((4, 4, (Segment(0, 2, 0, -1),)), r"outside \[0, 4\)"),
    "rows past the end": ((1, 4, (Segment(0, 2, 0, 0),)), "ends at row 2 of 1"),
    "negative rows": ((-1, 4, ()), "ends at row 0 of -1"),
    "negative keys": ((1, -1, ()), "-1 keys"),
}


@pytest.mark.parametrize("name", REFUSED_LAYOUTS)
def test_a_layout_refuses(name: str) -> None:
    arguments, message = REFUSED_LAYOUTS[name]
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


REFUSED_OFFSETS = {
    "no offsets": (((), 1, 0, None), r"offsets=\(\) must start at 0"),
    "not from zero": (((1, 3), 1, 0, None), "must start at 0"),
    "descending": (((0, 3, 2), 1, 0, None), "never descend"),
    "descending padding": (((0, 1, 2), 1, 0, (0, 4, 2)), r"padded_offsets=\(0, 4, 2\)"),
    "padding of another count": (((0, 1, 2), 1, 0, (0, 4)), "3 offsets but 2 padded_offsets"),
    "padding too short": (((0, 3), 1, 0, (0, 2)), "3 tokens has 2 padded ones"),
    "padding too short for one document": (((0, 1, 4), 1, 0, (0, 3, 5)), "3 tokens has 2 padded ones"),
    "rank too high": (((0, 8), 2, 2, None), "cp_rank=2 is not one of cp_size=2"),
    "negative rank": (((0, 8), 2, -1, None), "cp_rank=-1"),
    "no ranks": (((0, 8), 0, 0, None), "cp_size=0"),
    "chunks do not divide": (((0, 6), 2, 0, None), r"6 padded tokens does not split into 2 \* cp_size = 4"),
}


@pytest.mark.parametrize("name", REFUSED_OFFSETS)
def test_a_builder_refuses(name: str) -> None:
    arguments, message = REFUSED_OFFSETS[name]
    with pytest.raises(ValueError, match=message):
        Layout.zigzag(*arguments)


@pytest.mark.parametrize("batch,length", [(-1, 3), (2, -3)])
def test_a_negative_batch_is_refused(batch: int, length: int) -> None:
    with pytest.raises(ValueError, match="must start at 0|never descend"):
        Layout.causal(batch, length)


@pytest.mark.parametrize("start,stop", [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_a_slice_outside_the_rows_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="asked of a layout of 6"):
        Layout.causal(2, 3).slice_rows(start, stop)


def test_equal_layouts_share_their_views() -> None:
    views = (row_bounds, valid_rows, positions, visible_keys)
    for view in views:
        assert view(Layout.packed((0, 3, 8)), "cpu") is view(Layout.packed((0, 3, 8)), torch.device("cpu"))


def test_views_made_under_inference_mode_can_be_used_in_training() -> None:
    """The first user of a layout may be an evaluation: what it caches must not poison the training step after it."""
    layout = Layout.packed((0, 3, 11), (0, 4, 14))
    with torch.inference_mode():
        views = [
            *row_bounds(layout, "cpu"),
            valid_rows(layout, "cpu"),
            positions(layout, "cpu"),
            visible_keys(layout, "cpu"),
        ]
    assert not any(view.is_inference() for view in views)
    weight = torch.ones(14, 2, requires_grad=True)
    weight.index_select(0, positions(layout, "cpu")).sum().backward()  # saves the view for backward
    assert weight.grad is not None


def test_views_do_not_depend_on_the_default_device() -> None:
    layout = Layout.packed((0, 2, 9), (0, 4, 12))
    with torch.device("meta"):
        assert row_bounds(layout, "cpu")[0].device.type == "cpu"
        assert visible_keys(layout, "cpu").sum() == 9
        order = zigzag_key_order((0, 4), 2, "cpu")
        assert order is not None and order[0].device.type == "cpu"


def calls_in(path: Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {ast.unparse(node.func).split(".")[-1] for node in tree if isinstance(node, ast.Call)}


def test_every_view_has_a_user_and_pinned_copies_have_one_place() -> None:
    own = Path(layout_module.__file__)
    functions = [node.name for node in ast.parse(own.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    others = {path: calls_in(path) for path in own.parent.rglob("*.py") if path != own}
    assert {name for name in functions if name[0] != "_"} <= set().union(*others.values())
    assert not any("pin_memory" in calls for calls in others.values())


def test_a_layout_is_its_own_whole_slice_and_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of segments are looked up by every layer."""
    layout, equal = (Layout.packed(tuple(range(0, 50, 5))) for _ in range(2))
    assert layout.slice_rows(0, layout.num_rows) is layout
    assert layout == equal and hash(layout) == hash(equal) != hash(Layout.packed((0, 45)))
    monkeypatch.setattr(Segment, "__hash__", None)
    assert hash(layout) == hash(equal)


def test_views_of_dead_layouts_are_let_go() -> None:
    """They are device memory: those of a few microbatches are kept."""
    first = Layout.packed((0, 7))
    kept = row_bounds(first, "cpu")[0]
    assert row_bounds(first, "cpu")[0] is kept
    for length in range(8, 40):
        row_bounds(Layout.packed((0, length)), "cpu")
    assert row_bounds(first, "cpu")[0] is not kept
