"""`import megatron` beside an installed megatron-core stops with one sentence. Each case is a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

from tests.unit_tests.tree_rules import ROOT


def _import(module: str, *extra_paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *extra_paths)))}
    return subprocess.run([sys.executable, "-c", f"import {module}"], env=environment, capture_output=True, text=True)


def test_imports_alone() -> None:
    result = _import("megatron.core")
    assert result.returncode == 0, result.stderr


def test_refuses_to_run_beside_megatron_core(tmp_path: Path) -> None:
    metadata = tmp_path / "megatron_core-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.8.7\n")
    result = _import("megatron.core", tmp_path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: megatron-core 9.8.7 is installed beside megatron-dsa")
    assert "pip uninstall megatron-core" in last
