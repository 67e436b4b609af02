"""What every test file shares: threads, hypothesis' profile, and what happens to tests that cannot run here.

GPU tests are deselected, not skipped, where no CUDA device is: a skip reads like a pass in a summary. So are the files
that compare with transformers where it is not installed (the release that they need wants Python 3.11). How many were
left out, and why, is printed above pytest's last line, also under pytest-xdist (whose workers do the collecting and
hand the counts over).

What a test measures instead of asserting stands there too: a property named ``MEASURED``, which travels with the
test's report, while pytest-xdist drops prints.
"""

import os
import re
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch is imported: two workers with a thread pool each fight for the cores, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

# Derandomized: a run tells about the change under test, and not about the day's random seed.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parents[1]

NO_DEVICE = "tests deselected: they need a CUDA device and none is here"
NOT_ASKED = "tests deselected: they take minutes and run with -m gpu_long"
NO_TRANSFORMERS = "test files left out: they need transformers 5.24.0, which wants Python 3.11 or newer"

MEASURED = "measured"

_left_out: Counter[str] = Counter()


def _reason_to_leave_out(item: pytest.Item, has_device: bool) -> str | None:
    long = item.get_closest_marker("gpu_long") is not None
    if not long and item.get_closest_marker("gpu") is None:
        return None
    if not has_device:
        return NO_DEVICE
    asked = "gpu_long" in (item.config.option.markexpr or "")
    return NOT_ASKED if long and not asked else None


@cache
def _imports_transformers(path: Path) -> bool:
    """Whether a test file imports transformers, itself or through another file of the suite."""
    source = path.read_text(encoding="utf-8")
    if re.search(r"^(from|import) transformers\b", source, re.MULTILINE):
        return True
    modules = re.findall(r"^from (tests\.[\w.]+) import", source, re.MULTILINE)
    files = [ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    return any(_imports_transformers(file) for file in files if file.is_file())


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not collection_path.match("test_*.py") or find_spec("transformers") is not None:
        return None
    if not _imports_transformers(collection_path):
        return None
    _left_out[NO_TRANSFORMERS] += 1
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_device = torch.cuda.is_available()
    reasons = [(item, _reason_to_leave_out(item, has_device)) for item in items]
    _left_out.update(reason for _, reason in reasons if reason is not None)
    deselected = [item for item, reason in reasons if reason is not None]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item, reason in reasons if reason is None]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    # Every worker collects the whole suite, so each hands over the same counts.
    counts = getattr(node, "workeroutput", {}).get("left_out", {})
    _left_out.update({reason: count for reason, count in counts.items() if reason not in _left_out})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for line in sorted({value for report in reports for name, value in report.user_properties if name == MEASURED}):
        terminalreporter.write_line(f"{line}.")
    for reason, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"{count} {reason}.")
