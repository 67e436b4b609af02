"""The tree keeps its budgets, and each budget can be broken: for every rule there is a made-up file that it refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit_tests import tree_rules as rules

Check = Callable[[str, str], list[str]]

PYTHON_CHECKS: list[Check] = [
    rules.check_lengths,
    rules.check_parameters,
    rules.check_dsa_imports,
    rules.check_suppressions,
]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cfg", ""}


def _sources(suffixes: set[str], folder: str = "") -> list[tuple[str, str]]:
    names = [n for n in rules.tracked_files() if n.startswith(folder) and Path(n).suffix in suffixes]
    return [(name, (rules.ROOT / name).read_text(encoding="utf-8")) for name in names]


@pytest.mark.parametrize("check", PYTHON_CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_its_budgets(check: Check) -> None:
    sources = _sources({".py"}, "megatron/")
    assert len(sources) > 5
    assert [sentence for path, source in sources for sentence in check(path, source)] == []


def test_no_function_has_too_many_branches_or_statements() -> None:
    assert rules.ruff_budget(rules.ROOT / "megatron") == []


def test_no_machine_paths_and_no_registry_hosts() -> None:
    found = [sentence for path, source in _sources(TEXT_SUFFIXES) for sentence in rules.check_words(path, source)]
    assert found == []


def test_every_document_that_is_named_exists() -> None:
    tracked = set(rules.tracked_files())
    sources = _sources({".py", ".md", ".toml", ".sh"})
    assert [s for path, text in sources for s in rules.check_named_documents(path, text, tracked)] == []


def test_the_readme_fits() -> None:
    assert len((rules.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


# Each row: a path, a source that breaks one rule by the smallest step, the check, and a piece of its sentence.
_DSA = rules.DSA
_BODY_60 = "    x = 1\n" * 60
_BODY_90 = "    x = 1\n" * 90
BROKEN = [
    ("megatron/a.py", "x = 1\n" * 401, rules.check_lengths, "401 lines, at most 400"),
    (f"{_DSA}/attention.py", "x = 1\n" * 121, rules.check_lengths, "121 lines, at most 120"),
    ("megatron/a.py", f"def f():\n{_BODY_60}", rules.check_lengths, "f has 61 lines, at most 60"),
    ("megatron/a.py", f"def launch_f():\n{_BODY_60}", rules.check_lengths, "launch_f has 61 lines, at most 60"),
    (f"{rules.KERNEL_FOLDER}a.py", f"def launch_f():\n{_BODY_90}", rules.check_lengths, "91 lines, at most 90"),
    ("megatron/a.py", f"def f():\n  def g():\n{_BODY_60}", rules.check_lengths, "f.g has 61 lines"),
    ("megatron/a.py", "def f(a, b, c, d, e, f, g, h): ...", rules.check_parameters, "f has 8 parameters"),
    ("megatron/a.py", "def f(a, b, c, d, *e, f, g, **h): ...", rules.check_parameters, "f has 8 parameters"),
    (
        "megatron/a.py",
        "class C:\n  def f(self, a, b, c, d, e, f, g, h): ...",
        rules.check_parameters,
        "C.f has 8 parameters",
    ),
    (f"{_DSA}/attention.py", "def f(a, b, c, d, e, f, g, h): ...", rules.check_parameters, "f has 8 parameters"),
    (f"{_DSA}/layout.py", "from megatron.core import x", rules.check_dsa_imports, "may leave dsa/"),
    (f"{_DSA}/layout.py", "from ... import x", rules.check_dsa_imports, "may leave dsa/"),
    (f"{_DSA}/backends/cudnn/a.py", "from ....mlp import x", rules.check_dsa_imports, "may leave dsa/"),
    (f"{_DSA}/layout.py", "def f():\n  import numpy", rules.check_dsa_imports, "cannot take along"),
    (f"{_DSA}/loss.py", "import triton", rules.check_dsa_imports, "cannot take along"),
    ("megatron/a.py", "def f():  # noqa: C901\n  ...", rules.check_suppressions, "silences a budget"),
    ("megatron/a.py", "def f():  # noqa\n  ...", rules.check_suppressions, "silences a budget"),
    ("megatron/a.py", "# ruff: noqa: C901", rules.check_suppressions, "silences a budget"),
    ("docs/index.md", "Runs land in /" + "home/me/runs.", rules.check_words, "a path of one machine"),
    ("docs/index.md", "pip install -i https://py" + "pi.org/simple", rules.check_words, "a package registry's host"),
]


@pytest.mark.parametrize(("path", "source", "check", "piece"), BROKEN)
def test_each_budget_can_be_broken(path: str, source: str, check: Check, piece: str) -> None:
    assert any(piece in sentence for sentence in check(path, source)), check(path, source)


KEPT = [
    ("megatron/a.py", "x = 1\n" * 400, rules.check_lengths),
    ("megatron/a.py", "def f():\n" + "    x = 1\n" * 59, rules.check_lengths),
    (f"{rules.KERNEL_FOLDER}a.py", "def launch_f():\n" + "    x = 1\n" * 89, rules.check_lengths),
    ("megatron/a.py", "class C:\n  def f(self, a, b, c, d, e, f, g): ...", rules.check_parameters),
    (
        f"{_DSA}/attention.py",
        "class DSAttention:\n  def forward(self, a, b, c, d, e, f, g, h): ...",
        rules.check_parameters,
    ),
    (f"{_DSA}/indexer.py", "from megatron.core import x", rules.check_dsa_imports),
    (f"{_DSA}/layout.py", "import torch, math\nfrom .loss import x\nfrom . import loss", rules.check_dsa_imports),
    (f"{rules.KERNEL_FOLDER}a.py", "import triton\nfrom ..protocol import TopK", rules.check_dsa_imports),
    ("megatron/a.py", "import numpy", rules.check_dsa_imports),
    ("megatron/a.py", "def f():  # noqa: PLR0913\n  ...", rules.check_suppressions),
    ("docs/index.md", "Runs land in runs/tiny and megatron/work/x.py; see /usr/bin.", rules.check_words),
]


@pytest.mark.parametrize(("path", "source", "check"), KEPT)
def test_a_file_at_its_budget_passes(path: str, source: str, check: Check) -> None:
    assert check(path, source) == []


def test_branches_and_statements_are_counted(tmp_path: Path) -> None:
    branchy = "def f(x):\n" + "".join(f"    if x == {i}:\n        return {i}\n" for i in range(8)) + "    return x\n"
    long = "def g():\n" + "    print()\n" * 41
    (tmp_path / "a.py").write_text(branchy + long)
    found = rules.ruff_budget(tmp_path / "a.py")
    assert len(found) == 2 and "C901" in found[0] and "PLR0915" in found[1]


def test_a_document_that_is_missing_is_found() -> None:
    text = "See GONE" + ".md and docs/index.md"
    found = rules.check_named_documents("a.py", text, {"docs/index.md"})
    assert len(found) == 1 and "GONE" in found[0]
