"""The documentation keeps up with the tree: generated tables, links, anchors of code, and imports in examples."""

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.core.models.gpt import build_gpt_model, get_preset
from megatron.core.transformer.experimental_attention_variant.dsa import record_topk, save_topk
from megatron.tools.compare_topk import main as compare_topk
from tests.unit_tests.tree_rules import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "docs" / "generate_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_tables_say_what_the_code_says() -> None:
    generator = _generator()
    page = generator.PAGE.read_text(encoding="utf-8")
    assert generator.render(page) == page, "run python docs/generate_tables.py"


def test_every_gate_becomes_a_row() -> None:
    generator = _generator()
    gates = generator.gates(generator.DSA_CONFIG)
    assert len(gates) >= 20
    source = (ROOT / generator.DSA_CONFIG).read_text(encoding="utf-8")
    assert len(gates) == len(re.findall(r"\braise ValueError\(", source))


def test_every_gate_names_its_test() -> None:
    generator = _generator()
    for path in (generator.CONFIG, generator.DSA_CONFIG):
        assert len(generator.test_cases(path)) == len(generator.gates(path))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def _python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_imports_in_examples_work(page: Path) -> None:
    for block in _python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_layout_examples_run() -> None:
    (block,) = [b for b in _python_blocks(ROOT / "docs" / "dsa.md") if "Layout.zigzag" in b]
    exec(block, {})


def test_the_replay_example_runs_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in _python_blocks(ROOT / "docs" / "dsa.md") if "replay_topk(model" in b]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block, names)
    assert torch.equal(names["recorded"], names["replayed"])


def test_the_parity_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording, replaying an engine's file and learning from it; then the comparison that the page names."""
    page = ROOT / "docs" / "rl_parity.md"
    model = build_gpt_model(get_preset("tiny-glm5"))
    tokens, labels = torch.randint(257, (2, 2, 48))
    monkeypatch.chdir(tmp_path)
    with record_topk(model) as record, torch.no_grad():
        model(tokens)
    save_topk("engine.safetensors", record)
    (block,) = _python_blocks(page)
    exec(block, {"model": model, "tokens": tokens, "labels": labels})
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    (arguments,) = re.findall(r"python -m megatron.tools.compare_topk ([\w. ]+?) *#", page.read_text(encoding="utf-8"))
    assert compare_topk(arguments.split()) == 0
