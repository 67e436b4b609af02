"""The conversion command: round trips over a checkpoint, training from an import, errors before anything is created."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.models.hf import config_from_folder, from_pretrained
from megatron.core.models.hf.tensor_folder import SINGLE_NAME
from megatron.tools.convert_hf import main
from megatron.training.pretrain_gpt import main as pretrain
from megatron.training.run_lock import held
from tests.unit_tests.core.models.hf.golden import FIXTURES, NAMES, hf_config, tensors
from tests.unit_tests.core.models.hf.test_pretrained import assert_same_in_transformers, with_mtp, write_checkpoint

RUN = (
    "--mock-data --tokenizer-type NullTokenizer --seq-length 24 --micro-batch-size 2 --train-iters 2 --lr 1e-3 "
    "--eval-iters 0 --dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss --device cpu"
).split()


def convert(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def same(written: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", NAMES)
def test_import_and_export_is_bit_equal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("import", "--hf", FIXTURES / name, "--save", tmp_path / "ours") == 0
    assert f"pretrain_gpt --load-hf {FIXTURES / name} --load {tmp_path / 'ours'}" in capsys.readouterr().out
    assert convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "theirs") == 0
    assert same(load_file(tmp_path / "theirs" / SINGLE_NAME), tensors(name, "model"))
    assert sorted(os.listdir(tmp_path / "theirs")) == ["config.json", SINGLE_NAME]
    assert config_from_folder(tmp_path / "theirs") == config_from_folder(FIXTURES / name)


def test_the_data_type_of_the_source_comes_back(tmp_path: Path) -> None:
    name = "a_glm_plain"
    stored = {key: value.bfloat16() for key, value in tensors(name, "model").items()}
    write_checkpoint(tmp_path / "in", hf_config(name) | {"dtype": "bfloat16"}, stored)
    assert convert("import", "--hf", tmp_path / "in", "--save", tmp_path / "ours") == 0
    assert convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "out") == 0
    written = load_file(tmp_path / "out" / SINGLE_NAME)
    assert same({key: value.bfloat16() for key, value in written.items()}, stored)
    assert {key for key, value in written.items() if value.dtype == torch.float32} == {
        key for key in written if ".mlp.gate." in key
    }
    assert convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "wide", "--dtype", "float32") == 0
    wide = load_file(tmp_path / "wide" / SINGLE_NAME)
    assert same(wide, {key: value.float() for key, value in stored.items()})


def test_training_continues_from_an_import_and_exports(tmp_path: Path) -> None:
    source = FIXTURES / "b_glm_indexshare"
    assert convert("import", "--hf", source, "--save", tmp_path / "ours") == 0
    flags = [*RUN, "--load-hf", str(source), "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "run")]
    assert pretrain([*flags, "--dsa-indexer-scoring-precision", "fp32"]) == 0
    arguments = ("--load", tmp_path / "run", "--ckpt-step", "2", "--tokenizer-from", source)
    assert convert("export", *arguments, "--hf", tmp_path / "out") == 0
    trained = load_file(tmp_path / "out" / SINGLE_NAME)
    unmoved = {key for key, value in tensors("b_glm_indexshare", "model").items() if torch.equal(trained[key], value)}
    assert len(unmoved) < len(trained) / 10
    assert_same_in_transformers(from_pretrained(tmp_path / "out"), tmp_path / "out")


RUNS_ELSEWHERE = {
    "kernels": {"dsa_kernel_backend": "cudnn"},
    "FP8 as an engine's": {
        "dsa_kernel_backend": "cudnn",
        "dsa_match_engine": "vllm",
        "dsa_indexer_scoring_precision": "fp8",
        "dsa_indexer_rope_fp32": True,
        "dsa_indexer_k_norm_fp32": True,
        "attention_latent_norm_epsilon": 1e-5,
    },
    "ranks": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
    "determinism": {
        "deterministic_mode": True,
        "dsa_kernel_backend": "cudnn",
    },
}


@pytest.mark.parametrize("run", RUNS_ELSEWHERE)
def test_what_another_machine_trained_is_exported_here(run: str, tmp_path: Path) -> None:
    name = "a_glm_plain"
    assert convert("import", "--hf", FIXTURES / name, "--save", tmp_path / "ours") == 0
    path = tmp_path / "ours" / "iter_0000000" / "config.json"
    record = json.loads(path.read_text())
    assert record["model"].keys() >= RUNS_ELSEWHERE[run].keys()
    record["model"] |= RUNS_ELSEWHERE[run]
    path.write_text(json.dumps(record))
    assert convert("export", "--load", tmp_path / "ours", "--hf", tmp_path / "theirs") == 0
    assert same(load_file(tmp_path / "theirs" / SINGLE_NAME), tensors(name, "model"))
    assert config_from_folder(tmp_path / "theirs") == config_from_folder(FIXTURES / name)


def test_load_hf_trains_as_the_import_does(tmp_path: Path) -> None:
    """Weights straight from the folder, and the same weights by way of a checkpoint, give the same losses."""
    source = str(FIXTURES / "a_glm_plain")
    assert convert("import", "--hf", source, "--save", tmp_path / "ours") == 0
    for name, load in (("straight", []), ("by_way", ["--load", str(tmp_path / "ours"), "--ckpt-step", "0"])):
        assert pretrain([*RUN, "--load-hf", source, *load, "--log-dir", str(tmp_path / name)]) == 0
    losses = [
        [json.loads(line)["lm_loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "by_way")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_checkpoint_wins_over_load_hf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command starts from the Hugging Face weights and, run again, resumes."""
    place = str(tmp_path / "run")
    flags = [*RUN, "--load-hf", str(FIXTURES / "a_glm_plain"), "--save", place, "--load", place]
    assert pretrain([*flags, "--train-iters", "1"]) == 0
    assert f"Weights come from {FIXTURES / 'a_glm_plain'}" in capsys.readouterr().err
    assert pretrain(flags) == 0
    said = capsys.readouterr().err
    assert "Resumed from" in said and "Weights come from" not in said


def test_mtp_and_irregular_schedules_need_their_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mtp = write_checkpoint(tmp_path / "mtp", hf_config("a_glm_plain"), with_mtp("a_glm_plain"))
    assert convert("import", "--hf", mtp, "--save", tmp_path / "ours") == 2
    assert "--skip-mtp" in capsys.readouterr().err
    assert pretrain([*RUN, "--load-hf", str(mtp)]) == 2
    assert "--skip-mtp" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    assert pretrain([*RUN, "--load-hf", str(mtp), "--skip-mtp"]) == 0
    assert convert("import", "--hf", mtp, "--save", tmp_path / "ours", "--skip-mtp") == 0

    # Layer 5 gets an indexer too: F F S S F F follows no frequency.
    name, schedule = "b_glm_indexshare", [1, 1, 0, 0, 1, 1]
    donor = {k: v for k, v in tensors(name, "model").items() if "layers.4.self_attn.indexer" in k}
    weights = tensors(name, "model") | {k.replace("layers.4", "layers.5"): v.clone() for k, v in donor.items()}
    config = hf_config(name) | {"indexer_types": ["full" if selects else "shared" for selects in schedule]}
    folder = write_checkpoint(tmp_path / "irregular", config, weights)
    flag = ["--dsa-indexer-topk-freq", *map(str, schedule)]
    assert convert("import", "--hf", folder, "--save", tmp_path / "listed") == 2
    assert pretrain([*RUN, "--load-hf", str(folder)]) == 2
    assert capsys.readouterr().err.count("indexer_types is irregular") == 2
    assert convert("import", "--hf", folder, "--save", tmp_path / "listed", *flag) == 0
    assert pretrain([*RUN, "--load-hf", str(folder), *flag]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import", "--hf", "nowhere", "--save", "new"), "nowhere/config.json does not exist"),
        (("import", "--save", "new"), "--hf"),
        (("import", "--hf", "nowhere", "--save", "new", "--frob"), "--frob"),
        (("export", "--load", "nowhere", "--hf", "new"), "holds no checkpoint"),
        (("export", "--load", "checkpoint", "--hf", "new", "--ckpt-step", "7"), "no checkpoint of step 7"),
        (("export", "--load", "checkpoint", "--hf", "checkpoint"), "exists and is not an empty folder"),
        (("export", "--load", "checkpoint", "--hf", "new", "--dtype", "int8"), "int8"),
        (("export", "--load", "nameless", "--hf", "new"), "does not hold the options of a model"),
        (("export", "--load", "mistyped", "--hf", "new"), "does not hold the options of a model"),
        (("export", "--load", "damaged", "--hf", "new", "--tokenizer-from", "nowhere"), "nowhere/config.json does not"),
        (("export", "--load", "softmax", "--hf", "new"), "moe_router_score_function='softmax' cannot be exported"),
        (("import", "--hf", "golden", "--save", "checkpoint"), "holds a checkpoint already"),
        (("import", "--hf", "golden", "--save", "no_latest"), "holds a checkpoint already"),
        (("import", "--hf", "golden", "--save", "in_use"), "--save in_use is in use by another run (process "),
        (("import", "--hf", "golden", "--save", "golden/config.json"), "is a file"),
        (("import", "--hf", "golden", "--save", ""), "argument --save: an empty path names nothing: give a path."),
        (("import", "--hf", "", "--save", "new"), "argument --hf: an empty path"),
        (("export", "--load", "", "--hf", "new"), "argument --load: an empty path"),
        (("export", "--load", "checkpoint", "--hf", ""), "argument --hf: an empty path"),
        (("export", "--load", "checkpoint", "--hf", "new", "--tokenizer-from", ""), "--tokenizer-from: an empty path"),
        (("import", "--hf", "golden", "--save", "/proc/x"), "--save /proc/x cannot be written to ("),
        (("export", "--load", "checkpoint", "--hf", "/proc/x"), "--hf /proc/x cannot be written to ("),
        ((), "import|export"),
    ],
)
def test_errors_are_one_sentence_and_leave_nothing(
    arguments: tuple[str, ...],
    message: str,
    checkpoints: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(checkpoints)
    before = sorted(checkpoints.rglob("*"))
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err
    assert code == 2
    assert message in printed and printed.count("\n") == 1
    assert sorted(checkpoints.rglob("*")) == before


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    (root / "golden").symlink_to(FIXTURES / "a_glm_plain")
    for name in ("checkpoint", "nameless", "mistyped", "damaged", "softmax"):
        assert convert("import", "--hf", FIXTURES / "a_glm_plain", "--save", root / name) == 0
    (root / "nameless" / "iter_0000000" / "config.json").write_text("{}")
    (root / "damaged" / "iter_0000000" / "__0_0.distcp").write_bytes(b"")  # whoever reads the weights first, stumbles
    mistyped = root / "mistyped" / "iter_0000000" / "config.json"
    mistyped.write_text(mistyped.read_text().replace('"hidden_size": ', '"hidden_size": [0], "unused": '))
    record = root / "softmax" / "iter_0000000" / "config.json"
    record.write_text(record.read_text().replace('"sigmoid"', '"softmax"'))
    (root / "no_latest" / "iter_0000003").mkdir(parents=True)
    with held({"--save": root / "in_use"}):
        yield root
