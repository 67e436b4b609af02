"""Compare RUN with RUN/frozen_indexer, the same run with a frozen indexer: ``python compare.py RUN``.

Prints what a trained indexer is worth and draws both runs' attention mass into RUN/attention_mass.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

from megatron.training.metrics import METRICS_FILE, read_metrics
from megatron.training.report import SUMMARY_FILE

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402


def main(run: Path) -> None:
    """Print and draw the comparison."""
    runs = {"trained indexer": run, "frozen indexer": run / "frozen_indexer"}
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name, folder in runs.items():
        held_out = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["held_out"]
        mass, loss = held_out["dsa_attention_mass"], held_out["lm_loss"]
        print(f"With a {name}, the selection holds {mass:.1%} of the attention; held-out LM loss {loss:.4f}.")
        points = [(r["step"], r["dsa_attention_mass"]) for r in read_metrics(folder / METRICS_FILE)]
        axis.plot(*zip(*((step, mass) for step, mass in points if mass is not None), strict=True), label=name)
    axis.set_xlabel("step")
    axis.set_title("share of dense attention that the selected keys hold")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(run / "attention_mass.png", dpi=120)
    print(f"Comparison: {run / 'attention_mass.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
