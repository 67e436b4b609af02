"""The picture and the sentences about a finished run."""

import json
from pathlib import Path

import pytest

from megatron.training.report import describe, plot_curves, write_summary

RECORDS = [
    {"step": step, "lm_loss": 5.0 - step, "indexer_loss": loss, "dsa_attention_mass": mass}
    for step, loss, mass in ((1, 0.1, 0.5), (2, 0.9, None), (3, 0.4, 0.75))
]


@pytest.mark.parametrize("records", [RECORDS, [], [{"step": 1, "lm_loss": 5.0}]])
def test_a_picture_is_drawn_whatever_was_measured(tmp_path: Path, records: list[dict[str, float]]) -> None:
    path = tmp_path / "new" / "curve.png"
    plot_curves([r | {"valid_lm_loss": 4.0} for r in records], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sentences() -> None:
    assert describe(RECORDS, {"lm_loss": 2.25, "split": "test"}, 257) == [
        "LM loss: 4.0000 at step 1, 2.0000 at step 3 (guessing evenly costs ln 257 = 5.5491).",
        "Indexer loss: 0.1000 at step 1, highest 0.9000 at step 2, 0.4000 at step 3.",
        "Attention mass of the selection: 0.500 at step 1, 0.750 at step 3.",
        "Held-out LM loss (test set): 2.2500.",
    ]
    assert describe([], {"split": "test"}, 257) == []


def test_the_summary_is_json(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", {"step": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"step": 3}
