"""Compare two files of selected keys: `python -m megatron.tools.compare_topk A B`.

The files come from `save_topk`, or from an inference engine that writes the same format. Printed are, for each layer,
the rows whose sets are equal and the mean overlap (keys in both sets over the larger set), the same over the rows that
had to choose (a row that sees no more keys than it selects takes them all, so it is always equal), and where the first
difference is. A picture shows both figures by layer, and the overlap by layer and token position.

Like diff, it ends with code 0 where the selections are equal, 1 where they differ and 2 where they cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.core.transformer.experimental_attention_variant.dsa.selection_file import SavedTopK, read_topk
from megatron.training.path_arguments import OneLineParser, path_text, require_writable

PROGRAM = "compare_topk"
POSITION_BINS = 64


class Place(NamedTuple):
    """A row: its layer (1-based), document and token (both from 0)."""

    layer: int
    document: int
    token: int


@dataclass(frozen=True)
class LayerComparison:
    """One layer's rows; sums run over all documents.

    Attributes:
        layer: its number, 1-based.
        rows, equal, overlap: rows, rows with equal sets, sum of the rows' overlaps.
        choosing_rows, choosing_equal, choosing_overlap: the same over rows that left a visible key out.
        bins: ``[2, POSITION_BINS]``: rows that choose, and their overlaps, by token position.
        first: the first row that differs.
    """

    layer: int
    rows: int
    equal: int
    overlap: float
    choosing_rows: int
    choosing_equal: int
    choosing_overlap: float
    bins: Tensor
    first: Place | None


def compare(a: SavedTopK, b: SavedTopK) -> Iterator[LayerComparison]:
    """Compare layer by layer.

    Raises:
        ValueError: the files hold other layers or documents.
    """
    if a.layers != b.layers:
        raise ValueError(
            f"{a.path} holds layers {list(a.layers)}, {b.path} layers {list(b.layers)}: record the same model in both."
        )
    if a.tokens != b.tokens:
        raise ValueError(
            f"{a.path} and {b.path} hold other documents ({_difference(a.tokens, b.tokens)}): record the same input in "
            "both."
        )
    return (_compare_layer(a, b, layer) for layer in a.layers)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog=PROGRAM, description="Compare two files of selected keys.", allow_abbrev=False)
    parser.add_argument("a", metavar="A", type=path_text, help="a file that save_topk or an inference engine wrote")
    parser.add_argument("b", metavar="B", type=path_text, help="another one, of the same input")
    parser.add_argument(
        "--png",
        metavar="FILE",
        type=path_text,
        default="compare_topk.png",
        help="picture to write (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    png = Path(options.png)
    try:
        if not png.parent.is_dir():
            raise ValueError(f"--png {png} lies in {png.parent}, which is no folder: create it first.")
        if png.is_dir():
            raise ValueError(f"--png {png} is a folder: name the file to write.")
        require_writable("The folder of --png", png.parent)
        a, b = read_topk(Path(options.a)), read_topk(Path(options.b))
        layers = list(tqdm(compare(a, b), total=len(a.layers), unit="layer", disable=None, leave=False))
        print(report(layers))
        draw(layers, max(a.tokens), f"{a.path.name} and {b.path.name}", png)
        print(f"Picture: {png}")
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return int(any(layer.first is not None for layer in layers))


def report(layers: Sequence[LayerComparison]) -> str:
    """The table, and a sentence."""
    lines = ["layer      rows    equal  overlap |  choosing    equal  overlap"]
    for c in layers:
        every = f"{c.layer:5d} {c.rows:9d} {_share(c.equal, c.rows)} {_share(c.overlap, c.rows)}"
        some = f"{c.choosing_rows:9d} {_share(c.choosing_equal, c.choosing_rows)}"
        lines.append(f"{every} | {some} {_share(c.choosing_overlap, c.choosing_rows)}")
    first = next((c.first for c in layers if c.first is not None), None)
    if first is not None:
        lines.append(f"First difference: layer {first.layer}, document {first.document}, token {first.token}.")
    elif any(c.choosing_rows for c in layers):
        lines.append("All layers select the same keys.")
    else:
        lines.append("All layers select the same keys, but no row had to choose: use documents longer than the top-k.")
    return "\n".join(lines)


def draw(layers: Sequence[LayerComparison], longest: int, title: str, path: Path) -> None:
    """Both figures by layer, and the overlap of the rows that choose by layer and token position."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = [str(c.layer) for c in layers]
    figure, (lines, heat) = pyplot.subplots(2, 1, figsize=(9, 7), constrained_layout=True)
    lines.plot(numbers, [_ratio(c.choosing_equal, c.choosing_rows) for c in layers], "o-", label="rows with equal sets")
    lines.plot(numbers, [_ratio(c.choosing_overlap, c.choosing_rows) for c in layers], "s-", label="mean overlap")
    lines.set(title=title, xlabel="layer", ylabel="share of the rows that choose", ylim=(-0.03, 1.03))
    lines.legend(loc="lower left")
    bins = torch.stack([c.bins for c in layers])
    overlap = bins[:, 1] / bins[:, 0]
    lowest = min(0.99, float(overlap.nan_to_num(1.0).min()))
    extent = (0, longest, len(layers) - 0.5, -0.5)
    image = heat.imshow(overlap.numpy(), "viridis", aspect="auto", interpolation="nearest", vmin=lowest, vmax=1)
    image.set_extent(extent)
    heat.set(xlabel="token's position in its document (blank: no row had to choose)", ylabel="layer")
    heat.set_yticks(range(len(layers)), numbers)
    figure.colorbar(image, ax=heat, label="mean overlap")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _compare_layer(a: SavedTopK, b: SavedTopK, layer: int) -> LayerComparison:
    totals, bins = torch.zeros(6, dtype=torch.float64), torch.zeros(2, POSITION_BINS, dtype=torch.float64)
    first = None
    for document, tokens in enumerate(a.tokens):
        pairs = zip(a.blocks(layer, document, 0, tokens), b.blocks(layer, document, 0, tokens), strict=True)
        for (start, ours), (_, theirs) in pairs:
            overlap, chooses = _overlap(ours, theirs, start)
            equal = overlap == 1
            if first is None and not equal.all():
                first = Place(layer, document, start + int((~equal).int().argmax()))
            for i, among in enumerate((torch.ones_like(chooses), chooses)):
                totals[3 * i : 3 * i + 3] += torch.stack([among.sum(), (equal & among).sum(), overlap[among].sum()])
            places = (torch.arange(start, start + len(overlap)) * POSITION_BINS // max(a.tokens))[chooses]
            bins[0].index_add_(0, places, torch.ones(len(places), dtype=torch.float64))
            bins[1].index_add_(0, places, overlap[chooses])
    rows, equal_rows, overlaps, choosing, choosing_equal, choosing_overlaps = totals.tolist()
    return LayerComparison(
        layer, int(rows), int(equal_rows), overlaps, int(choosing), int(choosing_equal), choosing_overlaps, bins, first
    )


def _overlap(a: Tensor, b: Tensor, first_token: int) -> tuple[Tensor, Tensor]:
    """Each row's overlap, FP64, and whether it left out a key that it sees."""
    larger = torch.maximum((a >= 0).sum(-1), (b >= 0).sum(-1))
    both = torch.cat((a, b), dim=-1).sort(dim=-1).values
    shared = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum(-1)
    return shared.double() / larger, larger <= torch.arange(first_token, first_token + len(larger))


def _ratio(part: float, whole: int) -> float:
    return part / whole if whole else float("nan")


def _share(part: float, whole: int) -> str:
    """A percentage that reads 100 only where nothing is missing."""
    if not whole:
        return f"{'-':>8}"
    return f"{'100':>7}%" if part == whole else f"{min(100 * part / whole, 99.9999):7.4f}%"


def _difference(a: Sequence[int], b: Sequence[int]) -> str:
    if len(a) != len(b):
        return f"{len(a)} and {len(b)} of them"
    number = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"document {number} has {a[number]} and {b[number]} tokens"


if __name__ == "__main__":
    sys.exit(main())
