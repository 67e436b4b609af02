"""What a finished run leaves behind: a picture of its curves, a summary file, and sentences about what it did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.metrics import as_json

CURVE_FILE = "loss_curve.png"
SUMMARY_FILE = "summary.json"
EVALUATION_FILE = "evaluation.json"  # of a run that evaluates and trains nothing

# (key of a record, axis title); panels without a single value are left out.
_PANELS = (
    ("lm_loss", "LM loss"),
    ("indexer_loss", "indexer loss (KL)"),
    ("load_balancing_loss", "load balancing loss"),
    ("dsa_attention_mass", "attention mass of the selection"),
)


def plot_curves(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the LM loss, the indexer loss and the attention mass over steps, each where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in _PANELS if _points(records, panel[0])]
    figure, axes = pyplot.subplots(1, max(len(panels), 1), figsize=(5 * max(len(panels), 1), 3.6), squeeze=False)
    for axis, (key, title) in zip(axes[0], panels, strict=False):
        points = _points(records, key)
        axis.plot(*zip(*points, strict=True), linewidth=1.2, label="training")
        held_out = _points(records, f"valid_{key}")
        if held_out:
            axis.plot(*zip(*held_out, strict=True), marker="o", markersize=3, label="validation")
            axis.legend()
        axis.set_xlabel("step")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the figures of a finished run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json(summary, indent=2) + "\n", encoding="utf-8")


def describe(records: Sequence[Mapping[str, Any]], held_out: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Sentences about what training did."""
    sentences = []
    losses = _points(records, "lm_loss")
    if losses:
        sentences.append(
            f"LM loss: {losses[0][1]:.4f} at step {losses[0][0]}, {losses[-1][1]:.4f} at step {losses[-1][0]} "
            f"(guessing evenly costs ln {vocab_size} = {math.log(vocab_size):.4f})."
        )
    indexer = _points(records, "indexer_loss")
    if indexer:
        peak = max(indexer, key=lambda point: point[1])
        sentences.append(
            f"Indexer loss: {indexer[0][1]:.4f} at step {indexer[0][0]}, highest {peak[1]:.4f} at step {peak[0]}, "
            f"{indexer[-1][1]:.4f} at step {indexer[-1][0]}."
        )
    mass = _points(records, "dsa_attention_mass")
    if mass:
        sentences.append(
            f"Attention mass of the selection: {mass[0][1]:.3f} at step {mass[0][0]}, {mass[-1][1]:.3f} at step "
            f"{mass[-1][0]}."
        )
    if held_out.get("lm_loss") is not None:
        sentences.append(f"Held-out LM loss ({held_out['split']} set): {held_out['lm_loss']:.4f}.")
    return sentences
