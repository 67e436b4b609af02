"""Finds, by reading source, every place where the order of a sum could differ from run to run.

Three kinds, each found in the function that holds it: calls of library kernels (cuDNN Frontend's ``*_wrapper``
functions, and whatever is imported from a kernel package), Triton kernels and their launches, and PyTorch operators
that scatter, or whose backward does. A function is known by ``path:qualified name`` and by a hash of its code without
docstrings, comments and layout.

What reading cannot see is indexing by a tensor (its backward accumulates): the manifest's ``RUNTIME_OPERATORS`` are
held against the operators that a training step really runs.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from tests.unit_tests.tree_rules import DSA, KERNEL_PACKAGES, ROOT, FunctionDef

FOLDERS = ("megatron/core", "megatron/training")
# Operators that accumulate at indices, or whose backward does; cumsum is a parallel scan on a GPU.
ACCUMULATING = {
    "bincount", "cumsum", "embedding", "gather", "histc", "index_add", "index_add_", "index_copy", "index_copy_",
    "index_put", "index_put_", "index_reduce", "index_reduce_", "index_select", "put_", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce", "take_along_dim",
}  # fmt: skip
# Of these the names mean something else: NumPy's run on the host, a collective's order is the network's, and what
# `self` holds is a module, found in its own file.
_OTHER_OWNERS = {"np", "numpy", "dist", "distributed", "self"}
# What a kernel package is imported for besides kernels: its namespace, whose wrappers are found where they are called.
_NAMESPACES = {"cudnn": {"DSA"}, "triton": {"language"}}


@dataclass(frozen=True)
class Found:
    """A function that dispatches: what it calls, in order of names, and the hash of its code."""

    calls: tuple[str, ...]
    source: str


def scan_tree() -> dict[str, Found]:
    """Every dispatching function below ``FOLDERS``; paths of the DSA folder are shortened to ``dsa/...``."""
    found = {}
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT)).replace(DSA, "dsa")
        found.update(scan(name, path.read_text(encoding="utf-8")))
    return found


def scan(path: str, source: str) -> dict[str, Found]:
    """The dispatching functions of one file."""
    tree = ast.parse(source)
    jitted = _jitted_by_call(tree)
    launches = re.search(r"^\s*import triton\b", source, flags=re.MULTILINE) is not None
    lines = _without_comments(source)
    found = {}
    for name, node in [("<module>", tree), *_functions(tree)]:
        calls = {call for call in _calls(node) if launches or not call.endswith("[grid]")}
        if isinstance(node, FunctionDef) and (node.name in jitted or _is_jitted(node)):
            calls.add("triton.jit")
        if calls:
            found[f"{path}:{name}"] = Found(tuple(sorted(calls)), _fingerprint(node, lines))
    return found


def _without_comments(source: str) -> list[str]:
    """The lines of a file, comments cut off."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return lines


def _fingerprint(node: ast.AST, lines: list[str]) -> str:
    """A hash of the code alone, the same in every Python: docstrings, comments and layout do not change it."""
    kept = list(lines)
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            docstring = body[0].value
            kept[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    if isinstance(node, FunctionDef):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        kept = kept[first - 1 : node.end_lineno]
    code = re.sub(r",([)\]}])", r"\1", "".join("".join(kept).split()))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionDef):
            yield prefix + node.name, node
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node`` that belong to no function inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FunctionDef):
            yield child
            yield from _own_nodes(child)


def _calls(node: ast.AST) -> Iterator[str]:
    for inner in _own_nodes(node):
        if isinstance(inner, ast.ImportFrom) and inner.level == 0:
            package = (inner.module or "").split(".")[0]
            names = {alias.name for alias in inner.names} - _NAMESPACES.get(package, set())
            yield from (f"{package}.{name}" for name in names if package in KERNEL_PACKAGES)
        elif isinstance(inner, ast.Call):
            yield from _called(inner.func)


def _called(function: ast.expr) -> Iterator[str]:
    if isinstance(function, ast.Subscript):
        yield f"{ast.unparse(function.value)}[grid]"
    elif isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if function.attr.endswith("_wrapper") or (function.attr in ACCUMULATING and owner not in _OTHER_OWNERS):
            yield function.attr


def _is_jitted(node: FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _jitted_by_call(tree: ast.AST) -> set[str]:
    """Names of functions that are handed to ``triton.jit``."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "triton.jit"]
    return {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
