"""The manifest lists every dispatch of the tree as it is, each with a test that exists; and the scanner finds them."""

import ast
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.training.arguments import parse_args
from megatron.training.pretrain_gpt import start
from tests.functional_tests.runs import DATA, INDEXER_LOSS, MODEL, TRAINING

from .dispatches import ACCUMULATING, scan, scan_tree
from .manifest import MANIFEST, RUNTIME_OPERATORS, Dispatch, differences, rehash

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
    "a Triton kernel": ("@triton.jit\ndef k(x): ...\n", "k", ("triton.jit",)),
    "a Triton kernel, wrapped later": ("def k(x): ...\n\n\nj = triton.jit(k)\n", "k", ("triton.jit",)),
    "a Triton launch": (LAUNCHES, "launch", ("kernel[grid]",)),
    "an accumulation": ("class C:\n    def f(self, x):\n        x.index_add_(0, i, y)\n", "C.f", ("index_add_",)),
    "one whose backward accumulates": ("def f(x):\n    return F.embedding(i, x)\n", "f", ("embedding",)),
    "in a nested function": ("def f(x):\n    def g():\n        x.scatter_add(0, i, y)\n", "f.g", ("scatter_add",)),
    "outside functions": ("y = x.bincount()\n", "<module>", ("bincount",)),
}


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


def test_rehashing_writes_the_present_hashes() -> None:
    found = {"a.py:f": scan("a.py", PLAIN)["a.py:f"]}
    text = 'MANIFEST: dict[str, Dispatch] = {\n    "a.py:f": Dispatch(("gather",), "?", "r"),\n}\n"?"\n'
    written = rehash(text, {"a.py:f": Dispatch(("gather",), "?", "r")}, found)
    assert written == text.replace('"?"', f'"{found["a.py:f"].source}"', 1)


# ---- what reading cannot see ----


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def test_the_accumulating_operators_of_a_training_step_are_known(tmp_path: Path) -> None:
    options = [
        "--reset-attention-mask",
        "--moe-router-load-balancing-type",
        "seq_aux_loss",
        "--moe-aux-loss-coeff",
        "1",
    ]
    run = ["--train-iters", "2", "--eval-iters", "0", "--log-dir", str(tmp_path)]
    with ExitStack() as stack, _Operators() as operators:
        start(parse_args([*MODEL, *INDEXER_LOSS, *DATA, *TRAINING, *options, *run]), stack).run()
    watched = ACCUMULATING | {"index", "embedding_dense_backward", "_index_put_impl_", "_unsafe_index_put"}
    assert operators.names & watched == set(RUNTIME_OPERATORS)
    assert not any("scaled_dot_product" in name for name in operators.names)
    assert torch.is_grad_enabled()
