"""What a user meets at the command line: sentences, exit codes, and nothing left behind by a run that cannot start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.data.indexed import IndexedDatasetBuilder
from megatron.training.pretrain_gpt import main
from megatron.training.run_lock import LOCK_FILE, held
from tests.functional_tests.runs import INDEXER_LOSS, MODEL, TINY, TRAINING, spawn, train

Prepare = Callable[[Path, Path], None]

RUN = ["--train-iters", "2"]
SAMPLES = ["--micro-batch-size", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with its checkpoint."""
    root = tmp_path_factory.mktemp("trained") / "run"
    assert train(*RUN, "--eval-iters", "0", "--save", root) == 0
    return root


def nothing(root: Path, trained: Path) -> None:
    pass


def empty(root: Path, trained: Path) -> None:
    root.mkdir()


def truncated_index(root: Path, trained: Path) -> None:
    root.mkdir()
    with IndexedDatasetBuilder(root / "text") as builder:
        builder.add_document(range(100))
    index = root / "text.idx"
    index.write_bytes(index.read_bytes()[:-3])


def checkpoint(root: Path, trained: Path) -> None:
    shutil.copytree(trained, root)


def damaged_checkpoint(root: Path, trained: Path) -> None:
    checkpoint(root, trained)
    data = next((root / "iter_0000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])


def damaged_metadata(root: Path, trained: Path) -> None:
    checkpoint(root, trained)
    (root / "iter_0000002/.metadata").write_bytes(b"")


def nonsense_latest(root: Path, trained: Path) -> None:
    root.mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")


FILES = [*MODEL, *INDEXER_LOSS, *TRAINING, *SAMPLES, "--seq-length", "24", "--eval-iters", "0", *RUN]

# What is on disk before, the command line ({root} is that folder), and pieces of the one sentence.
REFUSED: list[tuple[Prepare, list[str], str]] = [
    (nothing, [*TINY, *RUN, "--num-layer", "3"], "--num-layer is no flag of this program: did you mean --num-layers?"),
    (nothing, [*TINY, *RUN, "--zzzz", "3"], "--zzzz is no flag of this program: see --help"),
    (nothing, [*TINY, *RUN, "--pipeline-model-parallel-size", "2"], "this package has no pipeline parallelism"),
    (nothing, [*TINY, *RUN, "--use-distributed-optimizer"], "this package has no distributed optimizer"),
    (nothing, [*TINY, *RUN, "--transformer-impl=transformer_engine"], "this package has no Transformer Engine layers"),
    (nothing, [*TINY, *RUN, "--fp8_format", "hybrid"], "this package has no FP8 training: use --bf16"),
    (nothing, [*TINY, *RUN, "--fp16"], "this package has no FP16 training and no loss scaling: use --bf16"),
    (nothing, [*TINY, *RUN, "--bf16", "--no-bf16"], "--bf16 and --no-bf16 contradict each other"),
    (nothing, [*TINY, *RUN, "--lr-warmup-fraction", "0.1"], "both say how long warm-up is"),
    (nothing, [*TINY, *RUN, "--lr-warmup-iters", "2"], "Warm-up takes 2 steps, but the schedule ends after 2"),
    (nothing, [*TINY, *RUN, "--min-lr", "1"], "--min-lr 1.0 is above --lr 0.01"),
    (
        nothing,
        [*TINY, *RUN, "--global-batch-size", "3"],
        "--global-batch-size 3 is no multiple of --micro-batch-size 2",
    ),
    (nothing, [*MODEL, "--mock-data"], "--micro-batch-size, --train-iters, --lr and --seq-length are missing"),
    (nothing, [*TINY, *RUN, "--save-interval", "2"], "--save-interval 2 has nowhere to save to"),
    (
        nothing,
        [*TINY, *RUN, "--tensor-model-parallel-size", "2"],
        "do not split into tensor_model_parallel_size=2",
    ),
    (nothing, [*TINY, *RUN, "--seq-length", "64", "--max-position-embeddings", "32"], "--seq-length 64 exceeds"),
    (nothing, [*TINY, *RUN, "--vocab-size", "100"], "--vocab-size 100 is smaller than the 257 tokens"),
    (nothing, [*TINY, *RUN, "--wandb-project", "p"], "needs the wandb package, which is not installed"),
    (nothing, [*TINY, *RUN, "--dsa-indexer-topk-freq", "0", "1"], "makes layer 1 reuse a selection"),
    (nothing, [*TINY, *RUN, "--dsa-kernel-backend", "tilelang"], "dsa_kernel_backend='tilelang' is unknown"),
    (nothing, [*TINY, *RUN, "--device", "cuda"], "--device cuda was given, but PyTorch finds no GPU"),
    (nothing, [*TINY, *RUN, "--load", "{root}"], "is no directory: check the path"),
    (empty, [*FILES, "--data-path", "{root}/text"], "{root}/text"),
    (truncated_index, [*FILES, "--data-path", "{root}/text"], "{root}/text.idx"),
    (checkpoint, [*TINY, *RUN, "--load", "{root}", "--hidden-size", "64"], "is [384, 32] there and [384, 64] here"),
    (checkpoint, [*TINY, *RUN, "--load", "{root}", "--num-layers", "1", "--moe-layer-freq", "1"], "is missing there"),
    (
        checkpoint,
        [*TINY, *RUN, "--load", "{root}", "--ckpt-step", "7"],
        "no checkpoint of step 7: the steps saved there",
    ),
    (damaged_checkpoint, [*TINY, *RUN, "--load", "{root}"], "iter_0000002 is damaged ("),
    (damaged_metadata, [*TINY, *RUN, "--load", "{root}"], "iter_0000002 is damaged ("),
    (nonsense_latest, [*TINY, *RUN, "--load", "{root}"], "holds 'release' instead of a step"),
    (empty, [*TINY, *RUN, "--load", "{root}", "--exit-on-missing-checkpoint"], "holds no checkpoint"),
]


@pytest.mark.parametrize(("prepare", "arguments", "piece"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_a_run_that_cannot_start_says_one_sentence_and_creates_nothing(
    prepare: Prepare,
    arguments: list[str],
    piece: str,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    prepare(root, trained)
    capsys.readouterr()
    places = ["--log-dir", "log", "--tensorboard-dir", "events"]
    if "--save-interval" not in arguments:
        places += ["--save", "save"]
    before = sorted(tmp_path.rglob("*"))
    assert main([argument.replace("{root}", str(root)) for argument in [*arguments, *places]]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("pretrain_gpt: ") and output.err.count("\n") == 1 and output.err[-2] in ".?"
    assert piece.replace("{root}", str(root)) in output.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--save", "--log-dir", "--tensorboard-dir", "--wandb-save-dir"])
def test_a_directory_that_cannot_be_made_is_refused_before_training(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, piece in (("/proc/x", "No such file or directory in /proc"), ("a" * 300, "File name too long")):
        assert train(*RUN, flag, place) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"pretrain_gpt: {flag} {place} cannot be written to ({piece}")
        assert said.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_the_longest_run_that_a_flag_can_name_starts(tmp_path: Path) -> None:
    assert train("--train-iters", 2**31 - 1, "--exit-interval", "1", "--log-dir", tmp_path, "--eval-iters", "0") == 0


def test_a_real_process_exits_with_2(tmp_path: Path) -> None:
    process = spawn("--num-layer", "3", "--save", tmp_path / "save")
    assert process.communicate()[1].splitlines() == [
        "pretrain_gpt: --num-layer is no flag of this program: did you mean --num-layers?"
    ]
    assert process.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_torchrun_with_one_process(tmp_path: Path) -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 1 -m megatron.training.pretrain_gpt"
    process = spawn(*RUN, "--save", tmp_path / "save", launcher=launcher.split())
    message = process.communicate()[1]
    assert process.returncode == 0, message
    assert json.loads((tmp_path / "save/summary.json").read_text())["step"] == 2


def test_processes_without_a_launcher_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train(*RUN, "--save", tmp_path / "save") == 2
    assert "WORLD_SIZE is 2, but RANK and MASTER_ADDR are not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK"])
def test_a_launchers_variable_that_is_no_number_is_one_sentence(variable: str) -> None:
    program = f"import os, runpy; os.environ[{variable!r}] = 'abc'; "
    program += "runpy.run_module('megatron.training.pretrain_gpt', run_name='__main__')"
    process = spawn(*RUN, launcher=["-c", program])
    message = process.communicate()[1]
    assert message.startswith(f"pretrain_gpt: {variable} is 'abc' in the environment") and message.count("\n") == 1
    assert process.returncode == 2


def test_help_groups_flags_and_shows_docstrings_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--preset", "glm-5", "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for piece in (
        "training options",
        "--num-layers INT Number of transformer layers. (default: 78)",
        "--moe-layer-freq INT|INT ... Which layers are MoE",
        "(default: [0]*3+[1]*75)",
        "--bf16, --no-bf16 Compute in BF16. (default: False)",
        "--lr-decay-style {constant,linear,cosine} Shape of the schedule after warm-up. (default: linear)",
    ):
        assert piece in text


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file with its size and time, but for the lock that the test itself holds."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("flag", ["--save", "--log-dir"])
def test_a_directory_that_another_run_uses_is_left_alone(
    tmp_path: Path, trained: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = contents(tmp_path)
    capsys.readouterr()
    with held({"--save": tmp_path / "run"}):
        assert train(*RUN, "--load", tmp_path / "run", flag, tmp_path / "run") == 2
        output = capsys.readouterr().err
        assert output.startswith(f"pretrain_gpt: {flag} {tmp_path / 'run'} is in use by another run (process ")
        assert output.count("\n") == 1 and contents(tmp_path) == before
        assert train(*RUN, "--load", tmp_path / "run", "--skip-train") == 0
    assert train("--train-iters", "3", "--load", tmp_path / "run", "--save", tmp_path / "run") == 0
    assert not list(tmp_path.rglob(LOCK_FILE))
