"""A checkpoint survives a save that dies anywhere, comes back bit for bit, and is refused where it does not fit."""

import builtins
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.training import checkpoint_files
from megatron.training.checkpoint_files import CHECKSUMS
from megatron.training.checkpointing import (
    LATEST,
    Progress,
    find_checkpoint,
    later_steps,
    load_checkpoint,
    save_checkpoint,
    saved_steps,
)
from megatron.training.config import CheckpointConfig, OptimizerConfig
from megatron.training.optimizer import build_optimizer, optimizer_state
from tests.unit_tests.training.deaths import Died, dies_at
from tests.unit_tests.training.models import build

Trained = tuple[torch.nn.Module, torch.optim.Optimizer]


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


def disk_full_in_an_archive(self: object, plan: object, planner: object) -> None:
    """As PyTorch's archive writer says it."""
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598") from None


def interrupted(self: object, plan: object, planner: object) -> None:
    raise KeyboardInterrupt


def test_a_full_disk_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", disk_full_in_an_archive)
    with pytest.raises(OSError, match=rf"^the disk is full, with \d+ MiB free in {tmp_path}$"):
        save(tmp_path, 1, small(1))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_last_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match=rf"^the disk is full, with \d+ MiB free in {tmp_path}$"):
        save(tmp_path, 1, small(1))
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, small(1))
    assert list(tmp_path.iterdir()) == []


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


def bytes_of_no_text(root: Path) -> None:
    (root / LATEST).write_bytes(b"\xff")


def digit_of_no_number(root: Path) -> None:
    (root / LATEST).write_text("\u00b2")


def run_holds(content: bytes) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        (root / "iter_0000001/run.json").write_bytes(content)

    return damage


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (broken_latest, "holds 'release' instead of a step"),
    (bytes_of_no_text, f"{LATEST} holds '\ufffd' instead of a step"),
    (digit_of_no_number, "holds '\u00b2' instead of a step"),
    (missing_step, r"no checkpoint of step 7: the steps saved there are \[1\]"),
    (run_holds(b"{"), "run.json cannot be read"),
    (run_holds(b"[]"), "run.json cannot be read"),
    (run_holds(b"\xff\xfe"), "run.json cannot be read"),
    (run_holds(b'{"step": 1}'), r"run.json cannot be read \('consumed_samples'\): resume from another step"),
    (run_holds(b'{"step": null, "consumed_samples": 10}'), "run.json cannot be read .step None, consumed_samples 10"),
    (run_holds(b'{"step": 1, "consumed_samples": -4}'), "run.json cannot be read .step 1, consumed_samples -4"),
    (run_holds(b'{"step": 1, "consumed_samples": 11}'), "run.json was changed after it was saved: restore it, or"),
]


@pytest.mark.parametrize(("damage", "pattern"), DAMAGES)
def test_a_damaged_directory_is_refused(tmp_path: Path, damage: Callable[[Path], None], pattern: str) -> None:
    save(tmp_path, 1, trained(1))
    damage(tmp_path)
    with pytest.raises(ValueError, match=pattern):
        find_checkpoint(CheckpointConfig(load=str(tmp_path)))


def change_bits(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_changed_bits_are_found(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1, small(1))
    change_bits(path / name)
    sentence = rf"^Checkpoint {path} is damaged \({name} does not hold the bytes that were saved\): resume from another"
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path, small(2))
    for content in ("[]", "{}", '{"block_bytes": "many", "files": {}}', '{"block_bytes": 1, "files": {"run.json": 1}}'):
        (path / CHECKSUMS).write_text(content)
        with pytest.raises(ValueError, match=r"run.json cannot be read \(checksums.json is not what was saved\)"):
            load(tmp_path, small(2))


def change_byte(content: bytearray, place: int) -> bytearray:
    content[place] ^= 1
    return content


# What becomes of a file of 2 1/2 or of 2 blocks of 16 bytes.
CHANGES: list[tuple[str, Callable[[bytearray], bytearray]]] = [
    ("first block", lambda content: change_byte(content, 3)),
    ("middle block", lambda content: change_byte(content, 20)),
    ("last byte", lambda content: change_byte(content, -1)),
    ("one byte less", lambda content: content[:-1]),
    ("one block less", lambda content: content[:-16]),
    ("nothing left", lambda content: content[:0]),
    ("one byte more", lambda content: content + b"0"),
    ("many blocks more", lambda content: content + b"0" * 50),
]


@pytest.mark.parametrize("length", [40, 32])
@pytest.mark.parametrize(("what", "change"), CHANGES, ids=[what for what, _ in CHANGES])
def test_every_byte_of_every_block_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, what: str, change: Callable[[bytearray], bytearray]
) -> None:
    monkeypatch.setattr(checkpoint_files, "_BLOCK_BYTES", 16)
    monkeypatch.setattr(checkpoint_files, "_READ_BYTES", 5)
    path = tmp_path / "__0_0.distcp"
    for name in (path.name, ".metadata", "run.json"):
        (tmp_path / name).write_bytes(bytes(range(length)))
    checksums = checkpoint_files.all_checksums(tmp_path, [checkpoint_files.own_checksums(tmp_path)])
    (tmp_path / CHECKSUMS).write_text(json.dumps(checksums))
    monkeypatch.setattr(checkpoint_files, "_BLOCK_BYTES", 2**28)  # the file says how it was cut
    checkpoint_files.require_saved_bytes(tmp_path, [path.name])
    path.write_bytes(change(bytearray(path.read_bytes())))
    with pytest.raises(ValueError, match="__0_0.distcp does not hold the bytes that were saved"):
        checkpoint_files.require_saved_bytes(tmp_path, [path.name])


# Blocks of each writer's file, and ranks that load them.
SHARES = [([7], 4), ([1], 4), ([2, 2, 2], 3), ([1] * 12, 12), ([3, 1, 9, 1], 5), ([5, 5], 1), ([], 3)]


@pytest.mark.parametrize(("blocks", "world"), SHARES)
def test_ranks_share_the_blocks_evenly(monkeypatch: pytest.MonkeyPatch, blocks: list[int], world: int) -> None:
    files = {f"__{writer}_0.distcp": ["0"] * count for writer, count in enumerate(blocks)}
    shares = []
    for own in range(world):
        monkeypatch.setattr(checkpoint_files, "rank", lambda own=own: own)
        monkeypatch.setattr(checkpoint_files, "world_size", lambda: world)
        shares.append(list(checkpoint_files._own_blocks(files | {"run.json": ["0"], ".metadata": ["0"]})))
    assert sorted(sum(shares, [])) == sorted((name, index) for name in files for index in range(len(files[name])))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if len(set(blocks)) == 1 and len(blocks) == world:
        assert [{name for name, _ in share} for share in shares] == [{name} for name in files]


def test_a_checkpoint_without_checksums_loads_unchecked(tmp_path: Path) -> None:
    saved, found = small(1), small(2)
    path = save(tmp_path, 1, saved)
    (path / CHECKSUMS).unlink()
    load(tmp_path, found)
    assert_equal(found, saved)
    (path / "run.json").write_text('{"step": 1, "consumed_samples": 11}')
    assert load(tmp_path, found)[0] == Progress(1, 11)


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


def test_only_directories_with_a_number_are_steps(tmp_path: Path) -> None:
    for name in (
        "iter_0000003",
        "iter_0000012",
        "iter_\u00b2",
        "iter_\u0663",
        "iter_0000001.replaced",
        "iter_",
        "iter_-1",
    ):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [3, 12]


# Where a run starts, and what it says beside checkpoints of later steps.
STARTS = [(0, "counts from step 0"), (2, "starts after step 2"), (3, None)]


@pytest.mark.parametrize(("step", "start"), STARTS)
def test_later_steps_are_named_before_they_are_replaced(tmp_path: Path, step: int, start: str | None) -> None:
    (tmp_path / "iter_0000003").mkdir()
    said = f"--save {tmp_path} holds checkpoints up to step 3, and this run {start}: it replaces each of the later ones"
    notices = later_steps(CheckpointConfig(save=str(tmp_path), load="other"), step)
    assert [notice.startswith(said) for notice in notices] == [True] * (start is not None)


def test_a_save_removes_what_a_killed_deletion_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, mine = tmp_path / ".deleted_iter_0000001", tmp_path / ".deleted_by_me"
    for folder in (left, mine):
        folder.mkdir()
        (folder / "file").touch()

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        save(tmp_path, 2, small(1))
    assert left.exists()
    save(tmp_path, 3, small(1))
    assert not left.exists() and mine.exists()


def test_an_earlier_step_can_be_chosen(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, trained(step))
    run = trained(3)
    assert load(tmp_path, run, ckpt_step=1)[0] == Progress(1, 10)
    assert_equal(run, trained(1))
