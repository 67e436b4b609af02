"""A whole run learns, measures itself, and leaves its files where it says."""

import errno
import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.training import trainer
from megatron.training.data.indexed import IndexedDatasetBuilder
from megatron.training.step import StepResult, train_step
from tests.functional_tests.runs import DATA, INDEXER_LOSS, MODEL, TRAINING, figures, train

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of forty steps."""
    root = tmp_path_factory.mktemp("run") / "run"
    flags = ["--train-iters", "40", "--eval-interval", "20", "--dsa-log-mass-interval", "10"]
    assert train(*flags, "--save", root, "--tensorboard-dir", root / "events") == 0
    return root


def test_every_step_is_in_the_metrics_file(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 41))
    for record in records:
        assert set(record["indexer_loss_by_layer"]) == {"1", "2"}
        assert record["indexer_loss"] == pytest.approx(sum(record["indexer_loss_by_layer"].values()) / 2)
        assert record["tokens_per_second"] == pytest.approx(4 * 24 / record["seconds"])
        assert record["tflops_per_gpu"] > 0 and record["grad_norm"] > 0 and record["mfu"] is None
        assert record["consumed_samples"] == 4 * record["step"]
    assert records[0]["lr"] == 0 and records[1]["lr"] == 1e-2
    assert [r["step"] for r in records if r["dsa_attention_mass"] is not None] == [1, 10, 20, 30, 40]
    assert [r["step"] for r in records if r.get("valid_lm_loss") is not None] == [20, 40]


def test_the_balance_loss_is_logged_where_it_is_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    balance = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1".split()
    assert train(*balance, "--train-iters", "2", "--log-dir", tmp_path, "--tensorboard-dir", tmp_path / "events") == 0
    said = capsys.readouterr().err
    losses = [record["load_balancing_loss"] for record in figures(tmp_path)]
    assert len(losses) == 2 and all(1 <= loss < 1.5 for loss in losses)
    assert all(f"load balancing loss {loss:.4f}" in said for loss in losses)
    events = EventAccumulator(str(tmp_path / "events")).Reload().Scalars("load_balancing_loss")
    assert [event.value for event in events] == pytest.approx(losses, rel=1e-6)
    assert "load_balancing_loss" not in figures(run)[0]


def test_the_losses_fall(run: Path) -> None:
    records = figures(run)
    assert abs(records[0]["lm_loss"] - math.log(257)) < 0.2
    assert records[-1]["lm_loss"] < math.log(257) - 1
    assert records[-1]["valid_lm_loss"] < records[19]["valid_lm_loss"]


def test_tensorboard_has_the_same_figures(run: Path) -> None:
    events = EventAccumulator(str(run / "events")).Reload()
    records = figures(run)
    for name in ("lm_loss", "indexer_loss", "lr", "grad_norm"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == [
            (r["step"], pytest.approx(r[name], rel=1e-6)) for r in records
        ]
    assert [e.step for e in events.Scalars("dsa_attention_mass")] == [1, 10, 20, 30, 40]
    assert "indexer_loss_by_layer/1" in events.Tags()["scalars"]


def test_the_files_of_a_finished_run(run: Path) -> None:
    assert (run / "loss_curve.png").read_bytes().startswith(PNG)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["step"] == 40 and summary["held_out"]["split"] == "test"
    assert summary["held_out"]["lm_loss"] < math.log(257)
    assert 0 < summary["held_out"]["dsa_attention_mass"] <= 1
    saved = json.loads((run / "iter_0000040/config.json").read_text())
    assert saved["model"]["hidden_size"] == 32 and saved["optimizer"]["lr"] == 1e-2


def test_the_end_of_a_run_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train("--train-iters", "2", "--save", tmp_path, "--tensorboard-dir", tmp_path / "events") == 0
    output = capsys.readouterr()
    assert output.out == ""
    backend, *lines = output.err.splitlines()
    assert backend.startswith("DSA runs on the reference backend (scoring bf16, loss sparse)")
    assert output.err.count("DSA runs on") == 1
    assert re.fullmatch(
        r"step 2/2: LM loss [\d.]+, indexer loss [\d.]+, mass [\d.]+, [\d.]+K? tokens/s, lr [\d.e-]+, grad norm [\d.]+",
        lines[1],
    )
    assert "Held-out LM loss (test set): 5." in output.err
    for what, name in {"Metrics": "metrics.jsonl", "Loss curves": "loss_curve.png", "Summary": "summary.json"}.items():
        assert f"{what}: {tmp_path / name}" in lines
    assert f"Checkpoint: {tmp_path / 'iter_0000002'}" in lines
    assert f"TensorBoard: tensorboard --logdir {tmp_path / 'events'}" in lines


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def poisoned(engine, batches, rate, probe=None) -> StepResult:
        seen.append(engine.model.embedding.word_embeddings.weight.detach().clone())
        if len(seen) == 4:
            hook = engine.model.decoder.register_forward_hook(lambda module, args, output: output * float("nan"))
            try:
                return train_step(engine, batches, rate, probe)
            finally:
                hook.remove()
                seen.append(engine.model.embedding.word_embeddings.weight.detach().clone())
        return train_step(engine, batches, rate, probe)

    monkeypatch.setattr(trainer, "train_step", poisoned)
    assert train("--train-iters", "6", "--save-interval", "2", "--save", tmp_path) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("The LM loss is nan at step 4: training stops; the last good checkpoint is")
    assert f"{tmp_path / 'iter_0000002'} (step 2)" in message
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert len(figures(tmp_path)) == 3
    assert torch.equal(seen[3], seen[4])


def test_a_full_disk_stops_the_run_and_names_the_last_good_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, saves = dcp.FileSystemWriter.write_data, []

    def full(self, plan, planner):
        saves.append(plan)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    assert train("--train-iters", "6", "--save-interval", "2", "--save", tmp_path) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("The checkpoint of step 4 cannot be saved (the disk is full, with ")
    assert f"the last good checkpoint is {tmp_path / 'iter_0000002'} (step 2)" in message
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_data_that_do_not_fit_the_tokenizer_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "text") as builder:
        builder.add_document([*range(250)] * 4 + [300])
    files = [*MODEL, *INDEXER_LOSS, *TRAINING, "--train-data-path", str(tmp_path / "text"), "--seq-length", "24"]
    assert train("--micro-batch-size", "4", "--train-iters", "20", "--eval-iters", "0", base=files) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"The data of step \d+ cannot be read \(.* holds the token 300, .*\): training stops; there is no", message
    )


def test_a_run_without_validation_data_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetBuilder(tmp_path / "text") as builder:
        builder.add_document(range(200))
    files = [*MODEL, *INDEXER_LOSS, *TRAINING, "--train-data-path", str(tmp_path / "text"), "--seq-length", "24"]
    assert train("--micro-batch-size", "2", "--train-iters", "2", "--eval-interval", "1", base=files) == 0
    output = capsys.readouterr().err
    assert "There is no validation set, so nothing is evaluated while training." in output
    assert "Held-out" not in output


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--train-iters", "2") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_indexer_has_no_loss_and_a_dense_model_no_mass(tmp_path: Path) -> None:
    frozen = [*MODEL, *DATA, *TRAINING, "--train-iters", "2", "--dsa-log-mass-interval", "1"]
    assert train("--log-dir", tmp_path / "frozen", base=frozen) == 0
    assert figures(tmp_path / "frozen")[1]["indexer_loss"] is None
    assert figures(tmp_path / "frozen")[1]["dsa_attention_mass"] > 0
    dense = [*frozen, "--experimental-attention-variant", "None"]
    assert train("--log-dir", tmp_path / "dense", base=dense) == 0
    assert figures(tmp_path / "dense")[1]["dsa_attention_mass"] is None


@pytest.mark.parametrize("per_token", [[], ["--calculate-per-token-loss"]], ids=["per-microbatch", "per-token"])
def test_losses_do_not_depend_on_the_micro_batch_size(tmp_path: Path, per_token: list[str]) -> None:
    flags = [*MODEL, *INDEXER_LOSS, *TRAINING, *per_token]
    flags += "--mock-data --seq-length 24 --global-batch-size 8 --eval-iters 0 --train-iters 3".split()
    flags += ["--dsa-indexer-scoring-precision", "fp32"]
    runs = {}
    for micro in (1, 2, 8):
        assert train("--micro-batch-size", micro, "--log-dir", tmp_path / str(micro), base=flags) == 0
        runs[micro] = figures(tmp_path / str(micro))
    for micro in (1, 2):
        for record, expected in zip(runs[micro], runs[8], strict=True):
            for name in ("lm_loss", "indexer_loss", "grad_norm"):
                assert record[name] == pytest.approx(expected[name], rel=1e-4), (micro, record["step"], name)


def test_skip_train_evaluates_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--train-iters", "2", "--skip-train", "--save", tmp_path) == 0
    assert "Held-out LM loss (test set): 5." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]


def test_an_evaluation_changes_nothing_of_the_run_that_it_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--save", tmp_path, "--tensorboard-dir", tmp_path / "events"]
    assert train("--train-iters", "4", "--save-interval", "2", *places) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train("--train-iters", "4", "--skip-train", *places, "--load", tmp_path, "--ckpt-step", "2") == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"Evaluation: {tmp_path / 'evaluation.json'}"
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["step"] == 2 and 5 < evaluation["held_out"]["lm_loss"] < 6
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now.keys() - files.keys() == {tmp_path / "evaluation.json"}
    assert [path for path in files if now[path] != files[path]] == []


def test_a_run_that_lets_figures_pass_that_are_not_finite_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(engine, batches, rate, probe=None) -> StepResult:
        result = train_step(engine, batches, rate, probe)
        if rate == 1e-2:  # the first step after warm-up
            with torch.no_grad():
                engine.model.output_layer.weight.fill_(float("nan"))
        return result

    monkeypatch.setattr(trainer, "train_step", poisoned)
    flags = ["--no-check-for-nan-in-loss-and-grad", "--untie-embeddings-and-output-weights", "--eval-interval", "2"]
    run = ["--save", tmp_path, "--load", tmp_path, "--tensorboard-dir", tmp_path / "events"]
    for last in (3, 5):  # the second run reads what the first one left
        assert train(*flags, *run, "--train-iters", last) == 0
    said = capsys.readouterr().err
    assert "LM loss nan" in said and "Held-out LM loss (test set): nan" in said
    records = figures(tmp_path)
    assert [record["lm_loss"] is None for record in records] == [False, False, True, True, True]
    assert [record["grad_norm"] is None for record in records] == [False, False, True, True, True]
    assert json.loads((tmp_path / "summary.json").read_text())["held_out"]["lm_loss"] is None
