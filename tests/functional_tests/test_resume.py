"""A run that is killed, stopped or continued ends in the same numbers as one that was left alone."""

import errno
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.functional_tests.runs import DATA, INDEXER_LOSS, MODEL, TRAINING, figures, spawn, train, wait_for_step

STEPS = ["--train-iters", "12", "--eval-interval", "4", "--dsa-log-mass-interval", "5"]
# Flags, and the steps after which the run is killed. Saving after every step, a kill mostly hits a save.
VARIANTS = {
    "fp32": (["--save-interval", "1"], (2, 7)),
    "bf16-recompute": (["--save-interval", "4", "--bf16", "--recompute-granularity", "full"], (6,)),
    "packed-per-token": (
        ["--save-interval", "3", "--reset-attention-mask", "--calculate-per-token-loss", "--num-workers", "1"],
        (8,),
    ),
}


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by flattened name."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return tensors


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_any_step_resumes_bit_for_bit(tmp_path: Path, variant: str) -> None:
    flags, kills = [*STEPS, *VARIANTS[variant][0]], VARIANTS[variant][1]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(*flags, "--save", whole) == 0
    for step in kills:
        process = spawn(*flags, "--save", killed, "--load", killed)
        wait_for_step(process, killed, step)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
    process = spawn(*flags, "--save", killed, "--load", killed)
    message = process.communicate()[1]
    assert process.returncode == 0, message
    assert "Resumed from" in message
    assert figures(killed) == figures(whole)
    expected, found = (saved_tensors(run / "iter_0000012") for run in (whole, killed))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_sigterm_saves_then_stops(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    flags = ["--train-iters", "300", "--eval-iters", "0"]
    process = spawn(*flags, "--save", stopped)
    wait_for_step(process, stopped, 2)
    process.terminate()
    message = process.communicate()[1]
    assert process.returncode == 0
    step = len(figures(stopped))
    assert f"Stopped after step {step} because of SIGTERM" in message
    assert (stopped / "latest_checkpointed_iteration.txt").read_text() == str(step)
    exits = ["--exit-interval", str(step + 2)]
    assert train(*flags, "--save", stopped, "--load", stopped, *exits) == 0
    assert train(*flags, "--save", whole, *exits) == 0
    assert figures(stopped) == figures(whole)


def test_exit_interval_and_duration_save_and_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--train-iters", "9", "--exit-interval", "3", "--save", tmp_path / "a") == 0
    assert (tmp_path / "a/latest_checkpointed_iteration.txt").read_text() == "3"
    assert "because of --exit-interval 3 (saved" in capsys.readouterr().err
    assert train("--train-iters", "9", "--exit-duration-in-mins", "1e-6", "--save", tmp_path / "b") == 0
    assert (tmp_path / "b/latest_checkpointed_iteration.txt").read_text() == "1"
    assert "because of --exit-duration-in-mins 1e-06 (saved" in capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [2, 6])
def test_every_step_after_a_resume_with_another_batch_size_has_its_samples(tmp_path: Path, batch_size: int) -> None:
    run = ["--save", tmp_path, "--load", tmp_path]
    assert train("--train-iters", "3", *run) == 0
    assert train("--train-iters", "7", "--global-batch-size", str(batch_size), *run) == 0
    records = figures(tmp_path)
    assert [record["consumed_samples"] for record in records] == [
        4,
        8,
        12,
        *(12 + batch_size * n for n in (1, 2, 3, 4)),
    ]
    assert [record["step"] for record in records if not record["lm_loss"]] == []


def test_a_run_that_ends_before_its_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--save", tmp_path, "--load", tmp_path]
    assert train("--train-iters", "3", *run) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    assert train("--train-iters", "2", *run) == 2
    assert "is of step 3, but --train-iters 2 ends before it" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def moments(checkpoint: Path) -> set[str]:
    names = (name for name in saved_tensors(checkpoint) if name.startswith("optimizer."))
    return {name.removeprefix("optimizer.").rpartition(".")[0] for name in names}


def test_the_indexer_joins_and_leaves_the_optimizer_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*MODEL, *DATA, *TRAINING, "--train-iters", "6", "--save", str(tmp_path), "--load", str(tmp_path)]
    indexer = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"
    backbone = "decoder.layers.0.self_attention.linear_proj.weight"

    assert train("--exit-interval", "2", base=common) == 0
    frozen = moments(tmp_path / "iter_0000002")
    assert backbone in frozen and indexer not in frozen

    assert train("--exit-interval", "4", base=[*common, *INDEXER_LOSS]) == 0
    assert "starts fresh for 10 parameters" in capsys.readouterr().err
    trained = saved_tensors(tmp_path / "iter_0000004")
    assert trained[f"optimizer.{backbone}.step"] == 4
    assert trained[f"optimizer.{indexer}.step"] == 2

    assert train(base=common) == 0
    frozen_again = saved_tensors(tmp_path / "iter_0000006")
    assert moments(tmp_path / "iter_0000006") == frozen
    assert frozen_again[f"optimizer.{backbone}.step"] == 6
    assert torch.equal(frozen_again[f"model.{indexer}"], trained[f"model.{indexer}"])


def test_a_run_that_will_replace_later_checkpoints_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-iters", "4", "--eval-iters", "0", "--save", tmp_path]
    assert train(*flags, "--save-interval", "2") == 0
    assert "holds checkpoints" not in capsys.readouterr().err
    held = f"--save {tmp_path} holds checkpoints up to step 4, and this run"
    replaces = "it replaces each of the later ones when it saves that step."
    assert train(*flags, "--skip-train") == 0 and train(*flags, "--load", tmp_path) == 0
    assert "holds checkpoints" not in capsys.readouterr().err
    assert train(*flags, "--load", tmp_path, "--ckpt-step", "2", "--exit-interval", "3") == 0
    assert f"{held} starts after step 2: {replaces}\n" in capsys.readouterr().err
    assert train(*flags, "--exit-interval", "1") == 0
    continues = f"To continue them, give --load {tmp_path}."
    assert f"{held} counts from step 0: {replaces} {continues}\n" in capsys.readouterr().err


def test_a_record_of_options_that_cannot_be_read_is_read_past(tmp_path: Path) -> None:
    run = ["--eval-iters", "0", "--save", tmp_path, "--load", tmp_path]
    assert train("--train-iters", "2", *run) == 0
    (tmp_path / "iter_0000002/config.json").write_text('{"model": 3, "optimizer": {"lr": [1]}}')
    assert train("--train-iters", "3", *run) == 0


def test_a_resume_says_which_options_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-iters", "6", "--save", tmp_path, "--load", tmp_path]
    assert train(*flags, "--exit-interval", "2") == 0
    assert train(*flags, "--exit-interval", "4") == 0
    assert "Options differ" not in capsys.readouterr().err
    assert train(*flags, "--lr", "0.02", "--dsa-indexer-loss-coeff", "2", "--seed", "7") == 0
    expected = "dsa_indexer_loss_coeff 1.0 -> 2.0, seed 1234 -> 7, lr 0.01 -> 0.02."
    assert f"Options differ from those of the checkpoint: {expected}" in capsys.readouterr().err


def test_only_every_nth_checkpoint_and_the_newest_are_retained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> list[int]:
        return sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*"))

    flags = ["--save-interval", "1", "--eval-iters", "0", "--save", tmp_path, "--load", tmp_path]
    assert train(*flags, "--train-iters", "2") == 0 and kept() == [1, 2]
    flags += ["--save-retain-interval", "3"]
    assert train(*flags, "--train-iters", "7") == 0 and kept() == [3, 6, 7]
    assert train(*flags, "--train-iters", "8") == 0 and kept() == [3, 6, 8]
    capsys.readouterr()

    def refuse(path: Path, original: Callable[..., None] = shutil.rmtree, **options: bool) -> None:
        if path.name.startswith(".deleted_"):
            raise PermissionError(errno.EACCES, "Permission denied")
        original(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert train(*flags, "--train-iters", "9") == 0 and kept() == [3, 6, 9]
    left = tmp_path / ".deleted_iter_0000008"
    warning = f"{left} cannot be deleted (Permission denied): the next save tries again."
    assert capsys.readouterr().err.splitlines().count(warning) == 1 and left.exists()
    monkeypatch.undo()
    assert train(*flags, "--train-iters", "10") == 0 and kept() == [3, 6, 9, 10] and not left.exists()


def test_a_resume_from_an_earlier_step_keeps_the_later_ones_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--train-iters", "4", "--save-interval", "2", "--save", tmp_path]
    assert train(*flags) == 0
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()
    capsys.readouterr()
    assert train(*flags, "--load", tmp_path, "--ckpt-step", "2") == 0
    notice = f"{tmp_path / 'metrics.jsonl'} held steps 3 to 4 of an earlier run: they are in metrics.1.jsonl now."
    assert capsys.readouterr().err.splitlines().count(notice) == 1
    assert (tmp_path / "metrics.1.jsonl").read_text().splitlines() == first[2:]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:2] == first[:2]


def test_evaluation_does_not_move_training(tmp_path: Path) -> None:
    assert train("--train-iters", "5", "--eval-interval", "1", "--log-dir", tmp_path / "often") == 0
    assert train("--train-iters", "5", "--eval-iters", "0", "--log-dir", tmp_path / "never") == 0
    often, never = (
        [{key: value for key, value in record.items() if not key.startswith("valid_")} for record in figures(run)]
        for run in (tmp_path / "often", tmp_path / "never")
    )
    assert often == never


def test_finetuning_takes_weights_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train("--train-iters", "3", "--save", first) == 0
    assert train("--train-iters", "2", "--load", first, "--finetune", "--save", second) == 0
    tensors = saved_tensors(second / "iter_0000002")
    assert {tensor.item() for name, tensor in tensors.items() if name.endswith(".step")} == {2.0}
    assert figures(second)[0]["lm_loss"] < figures(first)[0]["lm_loss"]
