"""The estimates of docs/parallelism.md are what its script computes."""

import importlib.util
import sys

import pytest

from tests.unit_tests.tree_rules import ROOT


def test_the_page_shows_what_the_script_prints(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("estimate_parallelism", ROOT / "docs" / "estimate_parallelism.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look their module up
    spec.loader.exec_module(script)
    for preset in ("glm-5.2", "deepseek-v3.2"):
        script.table(preset)
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out in page, "run python docs/estimate_parallelism.py, and put its tables into the page"
