"""A checkpoint survives a save that dies anywhere, comes back bit for bit, and is refused where it does not fit."""

import builtins
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.training.checkpointing import LATEST, Progress, find_checkpoint, load_checkpoint, save_checkpoint
from megatron.training.config import CheckpointConfig, OptimizerConfig
from megatron.training.optimizer import build_optimizer, optimizer_state
from tests.unit_tests.training.models import build

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def trained(seed: int, steps: int = 1, **options: object) -> Trained:
    model = build(seed, **options)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
        optimizer.step()
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            module.expert_bias.fill_(float(seed))
    return model, optimizer


def small(seed: int) -> Trained:
    """A single layer: these tests are about files."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.01))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(root: Path, step: int, run: Trained, **options: object) -> Path:
    config = CheckpointConfig(save=str(root), **options)
    return save_checkpoint(root, Progress(step, step * 10), *run, config, {"model": {"hidden_size": 32}})


def load(root: Path, run: Trained, **options: object) -> tuple[Progress, list[str]]:
    config = CheckpointConfig(load=str(root), **options)
    checkpoint = find_checkpoint(config)
    assert checkpoint is not None
    return checkpoint.progress, load_checkpoint(checkpoint, *run, config)


def assert_equal(found: Trained, expected: Trained) -> None:
    for name, tensor in expected[0].state_dict().items():
        assert torch.equal(found[0].state_dict()[name], tensor), name
    states = [optimizer_state(*run) for run in (found, expected)]
    assert states[0].keys() == states[1].keys()
    for name, state in states[1].items():
        assert all(torch.equal(states[0][name][key], value) for key, value in state.items()), name


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = trained(1, steps=3)
    path = save(tmp_path, 3, saved)
    drawn = torch.rand(4)
    torch.manual_seed(99)
    fresh = trained(2)
    assert load(tmp_path, fresh) == (Progress(3, 30), [])
    assert_equal(fresh, saved)
    assert torch.equal(torch.rand(4), drawn)
    assert (tmp_path / LATEST).read_text() == "3" and path == tmp_path / "iter_0000003"
    assert json.loads((path / "config.json").read_text()) == {"model": {"hidden_size": 32}}
    assert json.loads((path / "run.json").read_text())["consumed_samples"] == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", LATEST]


# Every operation of a save that changes what is on disk, as (module, function).
OPERATIONS: list[tuple[Any, str]] = [
    (dcp, "save"),
    (json, "dump"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
    (builtins, "open"),
]


def dies_at(monkeypatch: pytest.MonkeyPatch, target: tuple[Any, str], call: int, after: bool) -> list[int]:
    module, name = target
    original, calls = getattr(module, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Died
        result = original(*args, **kwargs)
        if calls[0] == call:
            raise Died
        return result

    monkeypatch.setattr(module, name, dying)
    return calls


@pytest.mark.parametrize("again", [False, True], ids=["new-step", "same-step-again"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("target", OPERATIONS, ids=lambda target: f"{target[0].__name__}.{target[1]}")
def test_a_save_that_dies_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: tuple[Any, str], after: bool, again: bool
) -> None:
    old, new = small(1), small(2)
    step = 1 if again else 2
    for call in range(1, 30):
        root = tmp_path / str(call)
        save(root, 1, old)
        with monkeypatch.context() as patch:
            calls = dies_at(patch, target, call, after)
            try:
                save(root, step, new)
            except (Died, OSError):  # a save turns what torch raises into an OSError
                pass
        found = small(3)
        progress, _ = load(root, found)
        whole = new if torch.equal(found[0].weight, new[0].weight) else old
        assert_equal(found, whole)
        assert progress.step == (1 if whole is old else step)
        save(root, 3, new)
        assert load(root, found)[0].step == 3
        assert {p.name for p in root.iterdir() if p.name.startswith(".")} == set()
        if calls[0] < call:
            return
    raise AssertionError("a save does more than expected")


def test_a_save_that_fails_leaves_nothing_and_names_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, plan: object, planner: object) -> None:
        raise RuntimeError("no space")

    save(tmp_path, 1, trained(1))
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match=r"no space, with \d+ MiB free in"):
        save(tmp_path, 2, trained(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", LATEST]


def test_optimizer_and_random_state_are_optional(tmp_path: Path) -> None:
    save(tmp_path, 1, trained(1), save_optim=False, save_rng=False)
    keys = dcp.FileSystemReader(tmp_path / "iter_0000001").read_metadata().state_dict_metadata
    assert all(key.startswith("model.") for key in keys)
    run = trained(2)
    _, fresh = load(tmp_path, run)
    assert len(fresh) == len([p for p in run[0].parameters() if p.requires_grad])
    assert optimizer_state(*run) == {}

    save(tmp_path, 2, trained(1))
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    run = trained(2)
    torch.manual_seed(5)
    assert load(tmp_path, run, load_optim=False, load_rng=False) == (Progress(2, 20), [])
    assert torch.equal(torch.rand(3), drawn)
    assert optimizer_state(*run) == {}


@pytest.mark.parametrize("then_trains", [False, True])
def test_moments_follow_what_trains(tmp_path: Path, then_trains: bool) -> None:
    frozen: dict[str, object] = {"dsa_indexer_loss_coeff": None, "dsa_indexer_use_sparse_loss": False}
    save(tmp_path, 1, trained(1, **(frozen if then_trains else {})))
    run = trained(2, **({} if then_trains else frozen))
    _, fresh = load(tmp_path, run)
    assert [name for name in fresh if ".indexer." not in name] == []
    assert len(fresh) == (5 if then_trains else 0)
    assert not any(".indexer." in name for name in optimizer_state(*run))


MISFITS: list[tuple[dict[str, object], str]] = [
    (
        {"hidden_size": 48},
        r"embedding.word_embeddings.weight is \[50, 32\] there and \[50, 48\] here; .*; and \d+ more",
    ),
    ({"vocab_size": 60}, r"embedding.word_embeddings.weight is \[50, 32\] [^;]*; output_layer.weight is [^;]* here\)"),
    (
        {"dsa_indexer_topk_freq": 1},
        r"decoder.layers.1.self_attention.core_attention.indexer\S+ is missing there; .*; and 2 more\)",
    ),
    ({"untie_embeddings_and_output_weights": False}, r"output_layer.weight exists only there\)"),
]


@pytest.mark.parametrize(("options", "pattern"), MISFITS)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, options: dict[str, object], pattern: str) -> None:
    save(tmp_path, 1, trained(1))
    with pytest.raises(ValueError, match=rf"iter_0000001 is of another model \({pattern}.*config\.json"):
        load(tmp_path, (build(**options), torch.optim.AdamW(build().parameters())))


def broken_latest(root: Path) -> None:
    (root / LATEST).write_text("release")


def missing_step(root: Path) -> None:
    (root / LATEST).write_text("7")


def unreadable_run(root: Path) -> None:
    (root / "iter_0000001/run.json").write_text("{")


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (broken_latest, "holds 'release' instead of a step"),
    (missing_step, r"no checkpoint of step 7: the steps saved there are \[1\]"),
    (unreadable_run, "run.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "pattern"), DAMAGES)
def test_a_damaged_directory_is_refused(tmp_path: Path, damage: Callable[[Path], None], pattern: str) -> None:
    save(tmp_path, 1, trained(1))
    damage(tmp_path)
    with pytest.raises(ValueError, match=pattern):
        find_checkpoint(CheckpointConfig(load=str(tmp_path)))


def test_an_empty_directory_starts_from_scratch_unless_forbidden(tmp_path: Path) -> None:
    assert find_checkpoint(CheckpointConfig(load=str(tmp_path))) is None
    with pytest.raises(ValueError, match="holds no checkpoint"):
        find_checkpoint(CheckpointConfig(load=str(tmp_path), exit_on_missing_checkpoint=True))


def test_a_directory_of_something_else_does_not_start_from_scratch(tmp_path: Path) -> None:
    save(tmp_path, 1, trained(1))
    with pytest.raises(ValueError, match=r"is the checkpoint of one step: give .*--ckpt-step"):
        find_checkpoint(CheckpointConfig(load=str(tmp_path / "iter_0000001")))
    hugging_face = tmp_path / "hf"
    hugging_face.mkdir()
    (hugging_face / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="pretrain_gpt reads it with --load-hf"):
        find_checkpoint(CheckpointConfig(load=str(hugging_face)))


def test_an_earlier_step_can_be_chosen(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, trained(step))
    run = trained(3)
    assert load(tmp_path, run, ckpt_step=1)[0] == Progress(1, 10)
    assert_equal(run, trained(1))
