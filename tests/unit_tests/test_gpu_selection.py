"""GPU tests on a machine without a device are deselected and counted, with workers and without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.tree_rules import ROOT

SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_on_device(i): assert False

@pytest.mark.gpu_long
def test_for_minutes(): assert False

def test_anywhere(): pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "workers"])
def test_gpu_tests_are_counted_and_left_out(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    command += ["-p", "no:cacheprovider", "-p", "tests.conftest", *workers, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "4 tests deselected: they need a CUDA device and none is here." in result.stdout
    assert "1 passed" in result.stdout.splitlines()[-1] and "failed" not in result.stdout
