"""The manifest lists every dispatch of the tree as it is, each with a test that exists; and the scanner finds them."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.functional_tests.runs import INDEXER_LOSS

from .dispatches import scan, scan_tree
from .manifest import (
    MANIFEST,
    RUNTIME_OPERATORS,
    RUNTIME_OPERATORS_OF_KERNELS,
    TESTED_VERSIONS,
    Dispatch,
    differences,
    rehash,
    replays_of_changes,
)
from .operators import KERNEL_SHAPES, Operators, train_some

FOLDER = Path(__file__).resolve().parents[1]


def test_the_manifest_describes_the_tree() -> None:
    assert differences(MANIFEST, scan_tree()) == []


@pytest.mark.parametrize("where", MANIFEST)
def test_each_dispatch_names_a_replay_test_that_exists(where: str) -> None:
    file, _, name = MANIFEST[where].replay.partition("::")
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_only_kernels_that_deterministic_mode_refuses_are_inexact() -> None:
    inexact = [where.rpartition(":")[2] for where, entry in MANIFEST.items() if not entry.exact]
    assert sorted(inexact) == ["dense_indexer_backward", "indexer_backward", "sparse_backward"]
    assert all(entry.exact or "spread" in entry.replay for entry in MANIFEST.values())


# ---- the gate closes ----

_DSA_FILE = "dsa/backends/cudnn/new.py"
LAUNCHES = "import triton\n\n\ndef launch(x):\n    kernel[(1,)](x)\n"
NEW_DISPATCHES = {
    "a library's wrapper": ("def f(x):\n    return _dsa().new_wrapper(x)\n", "f", ("new_wrapper",)),
    "a name of a kernel package": ("def f():\n    from flash_mla import g\n    return g\n", "f", ("flash_mla.g",)),
    "what is called on a kernel package": (
        "import flash_mla as fm\n\n\ndef f(x):\n    fm.ops.g(x)\n", "f", ("flash_mla.g",),
    ),
    "a name of DeepGEMM": ("def f():\n    from deep_gemm import g\n    return g\n", "f", ("deep_gemm.g",)),
    "a namespace's function": ("from cudnn import DSA\n\n\ndef f(x):\n    DSA.new(x)\n", "f", ("new",)),
    "one of a namespace that is handed out": (
        "def dsa():\n    from cudnn import DSA\n\n    return DSA\n\n\ndef f(x):\n    dsa().new(x)\n", "f", ("new",),
    ),
    "a Triton kernel": ("@triton.jit\ndef k(x): ...\n", "k", ("triton.jit",)),
    "a Triton kernel, wrapped later": ("def k(x): ...\n\n\nj = triton.jit(k)\n", "k", ("triton.jit",)),
    "a Triton launch": (LAUNCHES, "launch", ("kernel[grid]",)),
    "a launch of another file's kernel": (
        "from .triton_rows import _kl_kernel as k\n\n\ndef f(x):\n    k[(1,)](x)\n", "f", ("k[grid]",),
    ),
    "a launch of another module's kernel": (
        "from . import triton_rows\n\n\ndef f(x):\n    triton_rows._kl_kernel[(1,)](x)\n", "f",
        ("triton_rows._kl_kernel[grid]",),
    ),
    "an imported operator": (
        "from torch import scatter_add as s\n\n\ndef f(x):\n    s(x, 0, i, y)\n", "f", ("scatter_add",),
    ),
    "a masked scatter": ("def f(x):\n    return x.masked_scatter(m, y)\n", "f", ("masked_scatter",)),
    "a cumulative sum of exponentials": ("def f(x):\n    return torch.logcumsumexp(x, 0)\n", "f", ("logcumsumexp",)),
    "a grouped product": ("def f(x):\n    return F.grouped_mm(x, y)\n", "f", ("grouped_mm",)),
    "what is compiled": ("@torch.compile\ndef f(x):\n    return x\n", "f", ("torch.compile",)),
    "what is compiled by call": ("g = torch.compile(f, mode='x')\n", "<module>", ("torch.compile",)),
    "what an imported name compiles": ("from torch import compile\n\ng = compile(f)\n", "<module>", ("torch.compile",)),
    "an accumulation": ("class C:\n    def f(self, x):\n        x.index_add_(0, i, y)\n", "C.f", ("index_add_",)),
    "one whose backward accumulates": ("def f(x):\n    return F.embedding(i, x)\n", "f", ("embedding",)),
    "in a nested function": ("def f(x):\n    def g():\n        x.scatter_add(0, i, y)\n", "f.g", ("scatter_add",)),
    "outside functions": ("y = x.bincount()\n", "<module>", ("bincount",)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEW_DISPATCHES)
def test_a_new_dispatch_is_found(name: str) -> None:
    source, function, calls = NEW_DISPATCHES[name]
    found = scan(_DSA_FILE, source)
    assert {where: dispatch.calls for where, dispatch in found.items()} == {f"{_DSA_FILE}:{function}": calls}
    (sentence,) = differences({}, found)
    assert "is not in the manifest: write its replay test" in sentence


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return np.cumsum(x) + dist.gather(x)\n",
        "def f(x):\n    return TABLE[x]()\n",
        "class C:\n    def f(self, x):\n        return self.embedding(x)\n",
        "from cudnn import DSA\n",
        "def f(x):\n    return re.compile(x), triton.cdiv(x, 2)\n",
        "from .tables import TABLE\n\n\ndef f(x):\n    return TABLE[x]()\n",
        "def f(x):\n    return x.sum()\n",
    ],
)
def test_what_is_no_dispatch_is_not_found(source: str) -> None:
    assert scan("megatron/core/a.py", source) == {}


PLAIN = "def f(x):\n    y = x.gather(0, x)\n    return y * 2\n"
SAME = [
    'def f(x):\n    """Doc."""\n    # Why.\n    y = x.gather(0, x)  # here\n\n    return y * 2\n',
    "def f(x):\n    y = x.gather(\n        0,\n        x,\n    )\n    return y * 2\n",
    "z = 3\n\n\ndef f(x):\n    y = x.gather(0, x)\n    return y * 2\n\n\ndef other(): ...\n",
]


@pytest.mark.parametrize("source", SAME)
def test_comments_docstrings_layout_and_neighbours_do_not_count(source: str) -> None:
    assert scan("a.py", source) == scan("a.py", PLAIN)


def test_changed_code_is_found() -> None:
    listed = {"a.py:f": Dispatch(("gather",), scan("a.py", PLAIN)["a.py:f"].source, "r.py::test_r")}
    assert differences(listed, scan("a.py", PLAIN)) == []
    for change in (("* 2", "* 3"), ("gather(0", "gather(1"), ("def f(x)", "def f(x, z=0)")):
        (sentence,) = differences(listed, scan("a.py", PLAIN.replace(*change)))
        assert "a.py:f changed" in sentence and "run r.py::test_r" in sentence
    (sentence,) = differences(listed, scan("a.py", PLAIN.replace("gather", "scatter")))
    assert "dispatches ('scatter',), not ('gather',)" in sentence
    (sentence,) = differences(listed, {})
    assert "dispatches nothing (any more)" in sentence


REACHED = """
SIZE: int = 3
_TABLE = {"a": SIZE}


def f(x):
    return g(x.gather(0, x))


def g(x):
    return C().h(x)


class C:
    def h(self, x):
        return self.k(x) + _TABLE["a"]

    def k(self, x):
        return x


def other(x):
    return C
"""


@pytest.mark.parametrize(
    "change",
    [
        ("= 3", "= 4"),
        ('"a": SIZE', '"a": 7'),
        ("C().h(x)", "-C().h(x)"),
        ('_TABLE["a"]', "1"),
        ("return x\n\n", "return -x\n\n"),
    ],
)
def test_what_a_function_names_counts(change: tuple[str, str]) -> None:
    """Constants, helpers and classes of its file, and what those name."""
    assert REACHED.count(change[0]) == 1
    assert scan("a.py", REACHED)["a.py:f"].source != scan("a.py", REACHED.replace(*change))["a.py:f"].source
    untouched = REACHED.replace("return C\n", "return -C\n").replace("SIZE: int", "# Why.\nSIZE: int")
    assert scan("a.py", REACHED) == scan("a.py", untouched)


def test_a_methods_helpers_are_those_of_its_class() -> None:
    source = (
        "class C:\n    def f(self, x):\n        return self.g(x.cumsum(0))\n\n    def g(self, x):\n        return x\n"
    )
    source += "\n    def h(self):\n        return 1\n"
    first = scan("a.py", source)["a.py:C.f"]
    assert first == scan("a.py", source.replace("return 1", "return 2"))["a.py:C.f"]
    assert first != scan("a.py", source.replace("return x\n", "return -x\n"))["a.py:C.f"]


def test_rehashing_writes_the_present_hashes() -> None:
    found = {"a.py:f": scan("a.py", PLAIN)["a.py:f"]}
    text = 'MANIFEST: dict[str, Dispatch] = {\n    "a.py:f": Dispatch(("gather",), "?", "r"),\n}\n"?"\n'
    written = rehash(text, {"a.py:f": Dispatch(("gather",), "?", "r")}, found)
    assert written == text.replace('"?"', f'"{found["a.py:f"].source}"', 1)


def test_rehashing_says_what_must_have_passed() -> None:
    found = {name: scan("a.py", PLAIN)["a.py:f"] for name in ("a.py:f", "a.py:g", "a.py:h")}
    manifest = {
        "a.py:f": Dispatch(("gather",), "?", "kernels/r.py::test_r"),
        "a.py:g": Dispatch(("gather",), "?", "kernels/r.py::test_r"),
        "a.py:h": Dispatch(("gather",), found["a.py:h"].source, "q.py::test_q"),
    }
    assert replays_of_changes(manifest, found) == ["tests/unit_tests/determinism/kernels/r.py::test_r"]


@pytest.mark.gpu
def test_the_libraries_are_those_that_were_tested() -> None:
    found = {name: version(name).partition("+")[0] for name in TESTED_VERSIONS}
    assert found == TESTED_VERSIONS, "run the replay tests with these versions, then correct TESTED_VERSIONS"


# ---- what reading cannot see ----


def test_the_accumulating_operators_of_training_steps_are_known(tmp_path: Path) -> None:
    options = [
        "--reset-attention-mask",
        "--moe-router-load-balancing-type",
        "seq_aux_loss",
        "--moe-aux-loss-coeff",
        "1",
    ]
    with Operators() as operators:
        train_some([*INDEXER_LOSS, *options], tmp_path)
    assert operators.accumulating == set(RUNTIME_OPERATORS)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [[], INDEXER_LOSS, ["--dsa-indexer-loss-coeff", "1"]], ids=["off", "sparse", "dense"])
def test_those_of_the_kernels_are_known(loss: list[str], tmp_path: Path) -> None:
    with Operators() as operators:
        train_some([*KERNEL_SHAPES, *loss, "--reset-attention-mask"], tmp_path)
    assert "_grouped_mm" in operators.accumulating
    assert operators.accumulating <= set(RUNTIME_OPERATORS) | set(RUNTIME_OPERATORS_OF_KERNELS)
