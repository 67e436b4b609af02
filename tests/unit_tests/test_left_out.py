"""The summary of a run: tests that cannot run here are left out and counted, and what tests measured is shown."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import conftest
from tests.unit_tests.tree_rules import ROOT

SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_on_device(i): assert False

@pytest.mark.gpu_long
def test_for_minutes(): assert False

def test_anywhere(record_property): record_property("measured", "spread of sums: 1.2e-06")

def test_that_fails(record_property):
    record_property("measured", "spread of products: 3e-3")
    assert False
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_gpu_tests_are_counted_and_measurements_are_shown(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-p", "tests.conftest", *workers, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout
    assert "4 tests deselected: they need a CUDA device and none is here." in result.stdout
    assert "spread of products: 3e-3.\nspread of sums: 1.2e-06.\n" in result.stdout
    last_line = result.stdout.splitlines()[-1]
    assert "1 failed, 1 passed" in last_line and "warning" not in last_line


def test_comparisons_with_transformers_are_counted_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: Counter[str] = Counter()
    monkeypatch.setattr(conftest, "_left_out", count)
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    sources = {
        "test_a": "import torch\nfrom transformers.models import x",
        "test_b": "x = 'from transformers'",
        "test_c": "from tests.test_a import y",
        "test_d": "from tests.test_b import y",
    }
    (tmp_path / "tests").mkdir()
    files = {name: tmp_path / "tests" / f"{name}.py" for name in sources}
    for name, source in sources.items():
        files[name].write_text(source)
    monkeypatch.setattr(conftest, "find_spec", lambda name: None)
    ignored = {name for name, file in files.items() if conftest.pytest_ignore_collect(file)}
    assert ignored == {"test_a", "test_c"} and dict(count) == {conftest.NO_TRANSFORMERS: 2}
    monkeypatch.setattr(conftest, "find_spec", lambda name: object())
    assert not any(conftest.pytest_ignore_collect(file) for file in files.values())
