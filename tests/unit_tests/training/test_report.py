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


def test_what_was_not_finite_is_left_out(tmp_path: Path) -> None:
    gone = {"lm_loss": None, "indexer_loss": None, "dsa_attention_mass": None, "valid_lm_loss": None}
    records = [RECORDS[0], {"step": 2} | gone, {"step": 3} | gone]
    plot_curves(records, tmp_path / "curve.png")
    assert describe(records, {"lm_loss": None, "split": "test"}, 257)[0].startswith("LM loss: 4.0000 at step 1, 4.0000")
    plot_curves(records[1:], tmp_path / "curve.png")
    assert describe(records[1:], {"lm_loss": float("nan"), "split": "test"}, 257) == [
        "Held-out LM loss (test set): nan."
    ]


def test_the_summary_is_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "summary.json"
    write_summary(path, {"step": 3, "held_out": {"lm_loss": float("nan")}})
    assert json.loads(path.read_text()) == {"step": 3, "held_out": {"lm_loss": None}}
