"""Whatever ends a run early, the steps it has finished are saved, and one sentence says why."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from megatron.training import metrics, report, trainer
from megatron.training.data.indexed import IndexedDatasetBuilder
from tests.functional_tests.runs import INDEXER_LOSS, MODEL, TRAINING, figures, train

LATEST = "latest_checkpointed_iteration.txt"


def during_the_evaluation(monkeypatch: pytest.MonkeyPatch, number: int, read: int) -> list[int]:
    """SIGTERM while evaluation ``number`` reads its micro-batch ``read``; counts the micro-batches of each stream."""
    original, counts = trainer.batches, []

    def batches(*arguments: Any) -> Iterator[Any]:
        place = len(counts)
        counts.append(0)
        for batch in original(*arguments):
            counts[place] += 1
            if place == number and counts[place] == read:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(trainer, "batches", batches)
    return counts


EVALUATIONS = ["--train-iters", "4", "--eval-interval", "2", "--eval-iters", "50"]


def test_sigterm_does_not_wait_for_the_end_of_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = during_the_evaluation(monkeypatch, number=1, read=5)
    assert train(*EVALUATIONS, "--save", tmp_path) == 0
    assert read[1] == 6  # two make a global batch
    assert "Stopped after step 2 because of SIGTERM (saved " in capsys.readouterr().err
    assert (tmp_path / LATEST).read_text() == "2"
    assert [record["step"] for record in figures(tmp_path)] == [1, 2]
    assert "valid_lm_loss" not in figures(tmp_path)[1]


def test_the_last_evaluation_can_be_left_and_had_by_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*EVALUATIONS, "--save", tmp_path, "--load", tmp_path]
    with monkeypatch.context() as patch:
        during_the_evaluation(patch, number=3, read=1)
        assert train(*flags) == 0
    output = capsys.readouterr().err
    assert "Stopped after step 4 because of SIGTERM (saved " in output and "Held-out" not in output
    assert not (tmp_path / "summary.json").exists()
    assert train(*flags) == 0
    assert "Held-out LM loss" in capsys.readouterr().err
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_data_that_cannot_be_read_cost_no_finished_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    with IndexedDatasetBuilder(tmp_path / "text") as builder:
        builder.add_document([*range(250)] * 4 + [300])
    files = [*MODEL, *INDEXER_LOSS, *TRAINING, "--train-data-path", str(tmp_path / "text"), "--seq-length", "24"]
    flags = ["--micro-batch-size", "2", "--train-iters", "40", "--eval-iters", "0", "--num-workers", workers]
    assert train(*flags, "--save", tmp_path / "run", base=files) == 1
    done = len(figures(tmp_path / "run"))
    assert done > 1 and (tmp_path / "run" / LATEST).read_text() == str(done)
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"The data of step {done + 1} cannot be read (")
    assert f" were made with): training stops; the last good checkpoint is {tmp_path / 'run'}/iter_" in message


def test_evaluation_data_that_cannot_be_read_cost_no_finished_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, streams = trainer.batches, []

    def batches(*arguments: Any) -> Iterator[Any]:
        streams.append(arguments)
        if len(streams) == 2:
            raise OSError("the disk went away")
        yield from original(*arguments)

    monkeypatch.setattr(trainer, "batches", batches)
    assert train(*EVALUATIONS, "--save", tmp_path) == 1
    assert (tmp_path / LATEST).read_text() == "2" and len(figures(tmp_path)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("The data of the evaluation cannot be read (the disk went away): training stops; the ")


def full_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The disk under the metrics has no space left for the figures of ``step`` and later ones."""
    original = metrics.MetricsWriter.write

    def write(self: metrics.MetricsWriter, record: metrics.Record) -> None:
        if record["step"] == step:
            self._file = open("/dev/full", "a")  # noqa: SIM115
        original(self, record)

    monkeypatch.setattr(metrics.MetricsWriter, "write", write)


def test_a_full_disk_under_the_metrics_costs_no_finished_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, 3)
    assert train("--train-iters", "6", "--log-dir", tmp_path / "log", "--save", tmp_path / "run") == 1
    assert (tmp_path / "run" / LATEST).read_text() == "3"
    message = capsys.readouterr().err.splitlines()[-1]
    sentence = "The figures of step 3 cannot be written (No space left on device: /dev/full): training stops; the last "
    assert message.startswith(sentence)


def unsynced(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    def sync(self: metrics.MetricsWriter) -> None:
        raise OSError("Disk quota exceeded")

    monkeypatch.setattr(metrics.MetricsWriter, "sync", sync)


LAST_FIGURES = [
    (full_at, "The figures of step 4 cannot be written (No space left on device: /dev/full): training stops; the last"),
    (unsynced, "The figures up to step 4 cannot be written (Disk quota exceeded): training stops; the last good"),
]


@pytest.mark.parametrize("flags", [["--train-iters", "4", "--eval-iters", "0"], ["--train-iters", "8"]], ids="".join)
@pytest.mark.parametrize(("break_figures", "sentence"), LAST_FIGURES, ids=["full", "unsynced"])
def test_figures_of_the_last_step_that_cannot_be_written_are_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    break_figures: Callable[[pytest.MonkeyPatch, int], None],
    sentence: str,
) -> None:
    break_figures(monkeypatch, 4)
    assert train(*flags, "--exit-interval", "4", "--log-dir", tmp_path / "log", "--save", tmp_path / "run") == 1
    assert (tmp_path / "run" / LATEST).read_text() == "4"
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


def test_figures_that_cannot_be_written_are_said_without_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsynced(monkeypatch, 2)
    assert train("--train-iters", "2", "--eval-iters", "0", "--log-dir", tmp_path) == 1
    sentence = "The figures up to step 2 cannot be written (Disk quota exceeded): training stops; there is no "
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)


def test_a_planned_stop_reads_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.batches

    def batches(*arguments: Any) -> Iterator[Any]:
        yield from islice(original(*arguments), 4)  # two make a global batch
        raise OSError("the disk went away")

    monkeypatch.setattr(trainer, "batches", batches)
    assert train("--train-iters", "6", "--exit-interval", "2", "--save", tmp_path) == 0
    sentence = f"Stopped after step 2 because of --exit-interval 2 (saved {tmp_path / 'iter_0000002'})."
    assert capsys.readouterr().err.splitlines()[-1] == sentence


def test_a_stop_before_the_first_step_saves_nothing_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--train-iters", "2", "--save", tmp_path / "a") == 0
    during_the_evaluation(monkeypatch, number=0, read=1)  # the first stream is that of the training data
    assert train("--train-iters", "4", "--load", tmp_path / "a", "--save", tmp_path / "b") == 0
    assert "Stopped after step 2 because of SIGTERM (not saved)." in capsys.readouterr().err
    assert not (tmp_path / "b" / LATEST).exists()


def test_an_evaluation_alone_that_cannot_read_does_not_talk_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(*arguments: Any) -> Iterator[Any]:
        raise OSError("the disk went away")
        yield

    assert train("--train-iters", "2", "--save", tmp_path) == 0
    monkeypatch.setattr(trainer, "batches", batches)
    assert train("--train-iters", "2", "--load", tmp_path, "--skip-train") == 1
    sentence = "The data of the evaluation cannot be read (the disk went away): the evaluation stops."
    assert capsys.readouterr().err.splitlines()[-1] == sentence


def test_a_full_disk_under_tensorboard_costs_no_finished_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread opens the file anew for each figure, and says what went wrong at a later one."""
    original, hook = metrics.MetricsWriter.write, threading.excepthook

    def write(self: metrics.MetricsWriter, record: metrics.Record) -> None:
        if record["step"] == 3:
            (path,) = (tmp_path / "events").iterdir()
            path.unlink()
            path.symlink_to("/dev/full")
        original(self, record)

    monkeypatch.setattr(metrics.MetricsWriter, "write", write)
    flags = ["--train-iters", "6", "--save-interval", "4", "--save", tmp_path / "run"]
    assert train(*flags, "--tensorboard-dir", tmp_path / "events") == 1
    saved = (tmp_path / "run" / LATEST).read_text()
    assert saved in ("3", "4")
    output = capsys.readouterr().err
    said = rf"^The figures (of|up to) step {saved} cannot be written \(No space left on device: {tmp_path}/events\): "
    assert re.search(said, output.splitlines()[-1]) and "Traceback" not in output
    assert threading.excepthook is hook


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.SUMMARY_FILE).mkdir()
    assert train("--train-iters", "2", "--save", tmp_path) == 1
    assert (tmp_path / LATEST).read_text() == "2"
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("The report of the run cannot be written ([Errno 21] Is a directory: ")


def test_a_second_interrupt_during_a_save_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, saves = dcp.FileSystemWriter.write_data, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        saves.append(self)
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    assert train("--train-iters", "6", "--save-interval", "2", "--save", tmp_path) == 130
    message = capsys.readouterr().err.splitlines()[-1]
    sentence = "Interrupted again, so the run stops at once; the last good checkpoint is "
    assert message.startswith(f"{sentence}{tmp_path / 'iter_0000002'} (step 2)")
    assert not list(tmp_path.glob(".*"))
