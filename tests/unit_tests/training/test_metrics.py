"""The metrics file after kills and resumes, and what each destination gets."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.training import metrics
from megatron.training.config import LoggingConfig
from megatron.training.metrics import METRICS_FILE, MetricsWriter, read_metrics, scalars


def write(folder: Path, first: int, last: int, **values: Any) -> None:
    writer = MetricsWriter(LoggingConfig(), folder, first, {})
    for step in range(first, last + 1):
        writer.write({"step": step, **values})
    writer.close()


def test_each_step_stands_there_once_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 1, 5, run="first")
    write(tmp_path, 4, 6, run="second")
    records = read_metrics(tmp_path / METRICS_FILE)
    assert [(r["step"], r["run"]) for r in records] == [
        (1, "first"), (2, "first"), (3, "first"), (4, "second"), (5, "second"), (6, "second")
    ]  # fmt: skip


def test_a_half_written_line_goes(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() + '{"step": 3, "lm_l')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write(tmp_path, 3, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


NO_RECORDS = [b"{}\n", b"[1]\n", b'{"step": null}\n', b"\xff\xfe\n", b"\0\0\0\n", b'{"step": 3, "l\n']


@pytest.mark.parametrize("line", NO_RECORDS)
def test_a_line_that_is_no_record_is_read_past(tmp_path: Path, line: bytes) -> None:
    write(tmp_path, 1, 2)
    path = tmp_path / METRICS_FILE
    with path.open("ab") as file:
        file.write(line + b'{"step": 3}\n')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    write(tmp_path, 4, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_steps_that_are_done_again_are_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    for first, loss in ((1, 3.0), (1, 2.0), (3, 1.0)):
        writer = MetricsWriter(LoggingConfig(), tmp_path, first, {})
        for step in range(first, 5):
            writer.write({"step": step, "lm_loss": loss})
        writer.close()
    found = {p.name: [(r["step"], r["lm_loss"]) for r in read_metrics(p)] for p in tmp_path.iterdir()}
    assert found == {
        "metrics.jsonl": [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)],
        "metrics.1.jsonl": [(1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0)],
        "metrics.2.jsonl": [(3, 2.0), (4, 2.0)],
    }
    assert writer.notices == [f"{path} held steps 3 to 4 of an earlier run: they are in metrics.2.jsonl now."]
    assert MetricsWriter(LoggingConfig(), tmp_path, 5, {}).notices == []


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    write(tmp_path, 1, 2, lm_loss=nan, indexer_loss_by_layer={"1": -inf, "2": 0.5}, lr=0.1, loads=[1.0, [nan]])
    write(tmp_path, 2, 2, lm_loss=inf)  # a resume reads what it finds

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines == [
        {"step": 1, "lm_loss": None, "indexer_loss_by_layer": {"1": None, "2": 0.5}, "lr": 0.1, "loads": [1.0, [None]]},
        {"step": 2, "lm_loss": None},
    ]


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(LoggingConfig(), tmp_path, 1, {})
    writer.write({"step": 1})
    writer.sync()
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 1
    writer.close()


def test_scalars_flatten_and_leave_out_what_is_no_number() -> None:
    record = {"step": 3, "a": 1, "b": None, "c": {"1": 0.5, "2": None}, "d": "text", "e": True}
    assert dict(scalars(record)) == {"a": 1.0, "c/1": 0.5}


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / METRICS_FILE) == []


def test_wandb_gets_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda figures, step: calls.append((step, figures)), finish=lambda: calls.append("finished")
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    options = LoggingConfig(wandb_project="p", wandb_exp_name="n", tensorboard_log_interval=2)
    options.wandb_save_dir = str(tmp_path / "new" / "runs")
    writer = MetricsWriter(options, None, 1, {"lr": 1})
    for step in (1, 2):
        writer.write({"step": step, "lm_loss": 0.5})
    writer.close()
    assert calls == [
        {"project": "p", "entity": None, "name": "n", "dir": options.wandb_save_dir, "config": {"lr": 1}},
        (2, {"lm_loss": 0.5}),
        "finished",
    ]
    assert Path(options.wandb_save_dir).is_dir()


def test_whether_wandb_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    assert not metrics.wandb_is_installed()
    monkeypatch.setattr(metrics, "find_spec", lambda name: name == "wandb")
    assert metrics.wandb_is_installed()
