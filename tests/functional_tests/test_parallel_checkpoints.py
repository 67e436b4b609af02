"""Checkpoints over ranks: between mixed sizes, with the indexer's loss switched, and exported to Hugging Face.

One test spawns four Gloo processes, then two that go on with what the four saved. Every comparison is of bits: whole
weights, expert biases and both Adam moments.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.core.models.hf.tensor_folder import SINGLE_NAME
from megatron.tools.convert_hf import main as convert
from megatron.training.step import Engine, train_step
from tests.functional_tests import parallel_runs as runs
from tests.functional_tests.parallel_runs import Case
from tests.ranks import run_on_ranks

TP2_CP2, CP4 = Case(4, tp=2, sp=True, cp=2, ep=2), Case(4, cp=4)
CP2, TP2, EP2 = Case(2, cp=2), Case(2, tp=2), Case(2, ep=2)
STEPS = 2
# Three steps, a checkpoint, three more.
HALF, RATE = 3, 1e-2
LOSS_OFF = {"dsa_indexer_loss_coeff": None, "dsa_indexer_use_sparse_loss": False}
SWITCHED = [Case(2, tp=2, sp=True), Case(2, ep=2)]
# What transformers can express.
EXPORTABLE = {
    "dsa_indexer_rope_interleaved": True,
    "attention_latent_norm_epsilon": 1e-6,
    "dsa_indexer_k_norm_epsilon": 1e-6,
    "moe_shared_expert_intermediate_size": 32,
}
EXPORTED = {"tp2": Case(2, tp=2, sp=True), "tp2-ep2": Case(2, tp=2, ep=2), "ep2": EP2}

State = dict[str, Tensor]


def on_four(folder: Path) -> dict[str, State]:
    states = {"tp2cp2 from 1": runs.load_and_save(TP2_CP2, folder / "one", folder / "tp2cp2-from-one", STEPS)}
    states["tp2cp2 trained"] = runs.save_trained(TP2_CP2, folder / "tp2cp2", STEPS)
    states["cp4 from tp2cp2"] = runs.load_and_save(CP4, folder / "tp2cp2", folder / "cp4", STEPS)
    return states


def on_two(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, case, source in (("cp2", CP2, "one-again"), ("tp2", TP2, "cp2"), ("ep2", EP2, "cp4")):
        results[f"{name} from {source}"] = runs.load_and_save(case, folder / source, folder / name, STEPS)
    for case in SWITCHED:
        results[f"switched {case}"] = switch_the_loss(case, folder / f"switched-{case}")
    for name, case in EXPORTED.items():
        results[f"exportable {name}"] = save_exportable(case, folder / f"exportable-{name}")
    return results


def train(engine: Engine, case: Case, steps: int) -> None:
    batches = runs.micro_batches(case, engine)
    for _ in range(steps):
        train_step(engine, batches, RATE)


def switch_the_loss(case: Case, folder: Path) -> dict[str, Any]:
    """Train without the indexer's loss, resume without and with it, and without it once more."""
    off = runs.make_engine(case, **LOSS_OFF)
    train(off, case, HALF)
    results: dict[str, Any] = {"saved": runs.save(off, folder / "off", HALF)}
    train(off, case, HALF)
    results["six"] = runs.state_of(off)

    resumed = runs.make_engine(case, seed=1, **LOSS_OFF)
    results["fresh off"] = runs.load(resumed, folder / "off", HALF)
    train(resumed, case, HALF)
    results["three and three"] = runs.state_of(resumed)

    on = runs.make_engine(case, seed=1)
    results["fresh on"], results["loaded on"] = runs.load(on, folder / "off", HALF), runs.state_of(on)
    train(on, case, 1)
    results["trained on"] = runs.save(on, folder / "on", HALF + 1)

    back = runs.make_engine(case, seed=1, **LOSS_OFF)
    results["fresh back"], results["loaded back"] = runs.load(back, folder / "on", HALF + 1), runs.state_of(back)
    train(back, case, 1)
    results["trained back"] = runs.state_of(back)
    return results


def save_exportable(case: Case, root: Path, source: Path | None = None) -> State:
    """Train a model that transformers can express, or load it from ``source``, and save it as a run does."""
    engine = runs.make_engine(case, seed=0 if source is None else 1, **EXPORTABLE)
    if source is None:
        train(engine, case, STEPS)
    else:
        assert runs.load(engine, source, STEPS) == []
    fields = dataclasses.asdict(engine.model.config)
    record = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in fields.items()}
    return runs.save(engine, root, STEPS, record)


def assert_equal(got: State, wanted: State) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(got[name], tensor)] == []


def part_of(state: State, prefix: str, indexers: bool) -> State:
    """The indexers' tensors of the model or the optimizer, or all others."""
    return {name: t for name, t in state.items() if name.startswith(prefix) and (".indexer." in name) == indexers}


def steps_counted(moments: State) -> set[float]:
    return {float(tensor) for name, tensor in moments.items() if name.endswith(".step")}


def check_the_loss_can_be_switched(results: dict[str, Any]) -> None:
    saved, loaded, trained = results["saved"], results["loaded on"], results["trained on"]
    assert not part_of(saved, "optimizer.", indexers=True)
    assert results["fresh off"] == []
    assert_equal(results["three and three"], results["six"])
    # On: the indexers' moments start fresh, everything else is kept.
    indexers = part_of(saved, "model.", indexers=True)
    assert {f"model.{name}" for name in results["fresh on"]} == indexers.keys()
    assert_equal({name: loaded[name] for name in saved}, saved)
    moments = part_of(trained, "optimizer.", indexers=True)
    assert steps_counted(moments) == {1.0} and len(moments) == 3 * len(indexers)
    assert steps_counted(part_of(trained, "optimizer.", indexers=False)) == {HALF + 1.0}
    assert not any(torch.equal(trained[name], tensor) for name, tensor in indexers.items())
    # Off again: the indexers stand still, and the others go on.
    assert results["fresh back"] == []
    assert_equal(results["loaded back"], {n: t for n, t in trained.items() if n not in moments})
    back = results["trained back"]
    assert_equal(part_of(back, "model.", indexers=True), part_of(trained, "model.", indexers=True))
    assert steps_counted(part_of(back, "optimizer.", indexers=False)) == {HALF + 2.0}


def check_export(name: str, folder: Path) -> None:
    """What two ranks trained exports in one process, to the bits of what one process saved of it."""
    sharded, one = folder / f"exportable-{name}", folder / f"one-{name}"
    trained = save_exportable(Case(1), one, sharded)
    for place in (sharded, one):
        assert convert(["export", "--load", str(place), "--hf", str(place / "hf")]) == 0
    exported, wanted = load_file(sharded / "hf" / SINGLE_NAME), load_file(one / "hf" / SINGLE_NAME)
    assert_equal(exported, wanted)
    norm = trained["model.decoder.final_layernorm.weight"]
    assert torch.equal(exported["model.norm.weight"], norm) and not torch.equal(norm, torch.ones_like(norm))


def test_checkpoints_over_ranks(tmp_path: Path) -> None:
    one = runs.save_trained(Case(1), tmp_path / "one", STEPS)
    four = run_on_ranks(4, on_four, tmp_path)
    trained = four[0]["tp2cp2 trained"]
    for states in four:
        assert_equal(states["tp2cp2 from 1"], one)
        assert_equal(states["cp4 from tp2cp2"], trained)
    assert_equal(runs.load_and_save(Case(1), tmp_path / "tp2cp2", tmp_path / "one-again", STEPS), trained)
    for results in run_on_ranks(2, on_two, tmp_path):
        for name in ("cp2 from one-again", "tp2 from cp2", "ep2 from cp4"):
            assert_equal(results[name], trained)
        for case in SWITCHED:
            check_the_loss_can_be_switched(results[f"switched {case}"])
    for name in EXPORTED:
        check_export(name, tmp_path)
