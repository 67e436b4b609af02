"""Finds, by reading source, every place where the order of a sum could differ from run to run.

Three kinds, each found in the function that holds it: calls of library kernels (whatever is imported from a kernel
package, and what is called on such a package or on cuDNN Frontend's namespace), Triton kernels and their launches, and
PyTorch operators that scatter, whose backward does, that are grouped or fused, or that are compiled.

A function is known by ``path:qualified name`` and by a hash of its code without docstrings, comments and layout: its
own, and that of all functions, classes and constants of its file that it names, and that those name. What it imports
has hashes of its own where it dispatches. The versions of the libraries are the manifest's ``TESTED_VERSIONS``.

What reading cannot see is indexing by a tensor (its backward accumulates): the manifest's ``RUNTIME_OPERATORS`` are
held against the operators that training steps really run.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from tests.unit_tests.tree_rules import DSA, KERNEL_PACKAGES, ROOT, FunctionDef, functions

FOLDERS = ("megatron/core", "megatron/training")
# Operators that accumulate at indices, or whose backward does; cumulative ones are parallel scans on a GPU, and fused
# ones may add up atomically in their backward.
ACCUMULATING = {
    "bincount", "cumprod", "cumsum", "embedding", "gather", "grouped_mm", "histc", "index_add", "index_add_",
    "index_copy", "index_copy_", "index_put", "index_put_", "index_reduce", "index_reduce_", "index_select",
    "logcumsumexp", "masked_scatter", "masked_scatter_", "put_", "scaled_dot_product_attention", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "segment_reduce", "take_along_dim",
}  # fmt: skip
# Of these the names mean something else: NumPy's run on the host, a collective's order is the network's, and what
# `self` holds is a module, found in its own file.
_OTHER_OWNERS = {"np", "numpy", "dist", "distributed", "self"}
_PACKAGES = KERNEL_PACKAGES | {"deep_ep", "deep_gemm", "flash_attn", "tilelang"}
# What a kernel package is imported for besides kernels: its namespace, whose kernels are found where they are called.
_NAMESPACES = {"cudnn": {"DSA"}, "triton": {"language"}}
# Calls of its names are no kernels: those are launched by subscript.
_LAUNCHED = "triton"


@dataclass(frozen=True)
class Found:
    """A function that dispatches: what it calls, in order of names, and the hash of its code."""

    calls: tuple[str, ...]
    source: str


@dataclass
class _Names:
    """What the names of one file stand for."""

    packages: dict[str, str] = field(default_factory=dict)  # alias -> kernel package
    namespaces: set[str] = field(default_factory=set)  # names of namespaces, and of functions that return one
    operators: dict[str, str] = field(default_factory=dict)  # alias -> PyTorch operator
    imported: dict[str, str] = field(default_factory=dict)  # alias -> name
    imports_triton: bool = False


def scan_tree() -> dict[str, Found]:
    """Every dispatching function below ``FOLDERS``; paths of the DSA folder are shortened to ``dsa/...``."""
    found = {}
    for name, source in _sources().items():
        found.update(scan(name, source))
    return found


@cache
def _sources() -> dict[str, str]:
    paths = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
    return {str(p.relative_to(ROOT)).replace(DSA, "dsa"): p.read_text(encoding="utf-8") for p in paths}


@cache
def _triton_kernels() -> set[str]:
    """Names of all Triton kernels of the tree."""
    trees = [ast.parse(source) for source in _sources().values() if _LAUNCHED in source]
    jitted = {node.name for tree in trees for _, node in functions(tree) if _is_jitted(node)}
    return jitted.union(*map(_jitted_by_call, trees))


def scan(path: str, source: str) -> dict[str, Found]:
    """The dispatching functions of one file."""
    tree = ast.parse(source)
    jitted, names, code = _jitted_by_call(tree), _names_of(tree), _Code(tree, source)
    found = {}
    for name, node in [("<module>", tree), *functions(tree)]:
        calls = set(_calls(node, names))
        if isinstance(node, FunctionDef) and (node.name in jitted or _is_jitted(node)):
            calls.add("triton.jit")
        if calls:
            found[f"{path}:{name}"] = Found(tuple(sorted(calls)), code.fingerprint(name, node))
    return found


# ---- what is called ----


def _names_of(tree: ast.AST) -> _Names:
    names = _Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            _note_packages(node, names)
        elif isinstance(node, ast.ImportFrom):
            _note_names(node, names)
    for name, node in functions(tree):
        returned = {n.value.id for n in ast.walk(node) if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)}
        if returned & names.namespaces:
            names.namespaces.add(name)
    return names


def _note_packages(node: ast.Import, names: _Names) -> None:
    for alias in node.names:
        package = alias.name.split(".")[0]
        if package == _LAUNCHED:
            names.imports_triton = True
        elif package in _PACKAGES:
            names.packages[alias.asname or package] = package


def _note_names(node: ast.ImportFrom, names: _Names) -> None:
    package = (node.module or "").split(".")[0] if node.level == 0 else ""
    for alias in node.names:
        known = alias.asname or alias.name
        names.imported[known] = alias.name
        if package != _LAUNCHED and alias.name in _NAMESPACES.get(package, set()):
            names.namespaces.add(known)
        if package == "torch" and alias.name in ACCUMULATING | {"compile"}:
            names.operators[known] = alias.name


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below ``node`` that belong to no function inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FunctionDef):
            yield child
            yield from _own_nodes(child)


def _calls(node: ast.AST, names: _Names) -> Iterator[str]:
    for inner in _own_nodes(node):
        if isinstance(inner, ast.ImportFrom) and inner.level == 0:
            package = (inner.module or "").split(".")[0]
            taken = {alias.name for alias in inner.names} - _NAMESPACES.get(package, set())
            yield from (f"{package}.{name}" for name in taken if package in _PACKAGES)
        elif isinstance(inner, ast.Call):
            yield from _called(inner.func, names)
        elif isinstance(inner, ast.Attribute) and ast.unparse(inner) == "torch.compile":
            yield "torch.compile"
        elif isinstance(inner, ast.Name) and names.operators.get(inner.id) == "compile":
            yield "torch.compile"


def _called(function: ast.expr, names: _Names) -> Iterator[str]:
    if isinstance(function, ast.Subscript):
        if _is_launch(function.value, names):
            yield f"{ast.unparse(function.value)}[grid]"
    elif isinstance(function, ast.Name):
        if names.operators.get(function.id, "compile") != "compile":
            yield names.operators[function.id]
    elif isinstance(function, ast.Attribute):
        root = _root(function.value)
        accumulates = function.attr in ACCUMULATING and ast.unparse(function.value) not in _OTHER_OWNERS
        if root in names.packages:
            yield f"{names.packages[root]}.{function.attr}"
        elif accumulates or root in names.namespaces or function.attr.endswith("_wrapper"):
            yield function.attr


def _is_launch(kernel: ast.expr, names: _Names) -> bool:
    """Whether ``kernel[...]`` is a Triton kernel: anything in a file that imports Triton, else a name of the tree's."""
    if names.imports_triton:
        return True
    owner, _, last = ast.unparse(kernel).rpartition(".")
    return bool(owner or last in names.imported) and names.imported.get(last, last) in _triton_kernels()


def _root(expression: ast.expr) -> str:
    """The name at which an attribute or a call without arguments begins."""
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    if isinstance(expression, ast.Call):
        expression = expression.func
    return expression.id if isinstance(expression, ast.Name) else ""


def _is_jitted(node: FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _jitted_by_call(tree: ast.AST) -> set[str]:
    """Names of functions that are handed to ``triton.jit``."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "triton.jit"]
    return {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}


# ---- what its code is ----


class _Code:
    """The definitions of one file, to hash a function with all that it names."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        self.lines = _code_lines(tree, source)
        self.definitions: dict[str, list[ast.AST]] = {}
        for statement in tree.body:
            for name in _bound(statement):
                self.definitions.setdefault(name, []).append(statement)
        for name, function in functions(tree):
            if "." in name:
                self.definitions.setdefault(name, []).append(function)

    def fingerprint(self, name: str, node: ast.AST) -> str:
        """A hash of the code alone, the same in every Python."""
        if isinstance(node, ast.Module):
            return _hash(self.lines)
        reached: dict[str, list[ast.AST]] = {}
        waiting = [(name, node)]
        while waiting:
            inside, current = waiting.pop()
            for used in self._used(inside, current) - reached.keys() - {name}:
                reached[used] = self.definitions[used]
                waiting += [(used, definition) for definition in reached[used]]
        others = [definition for used in sorted(reached) for definition in reached[used]]
        return _hash([line for part in (node, *others) for line in self._lines_of(part)])

    def _used(self, inside: str, node: ast.AST) -> set[str]:
        """Definitions of this file that ``node`` names; ``self.x`` is one of its class."""
        owner = inside.partition(".")[0]
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for n in ast.walk(node):
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls"):
                used.add(f"{owner}.{n.attr}")
        return used & self.definitions.keys()

    def _lines_of(self, node: ast.AST) -> list[str]:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        return self.lines[first - 1 : node.end_lineno]


def _bound(statement: ast.stmt) -> list[str]:
    """Names that a statement of a file's top level defines."""
    if isinstance(statement, FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [n.id for target in targets if target is not None for n in ast.walk(target) if isinstance(n, ast.Name)]


def _code_lines(tree: ast.AST, source: str) -> list[str]:
    """The lines of a file without comments and docstrings."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for inner in ast.walk(tree):
        body = getattr(inner, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            start, stop = first.lineno - 1, first.end_lineno
            lines[start:stop] = [""] * (stop - start)
    return lines


def _hash(lines: list[str]) -> str:
    code = re.sub(r",([)\]}])", r"\1", "".join("".join(lines).split()))
    return hashlib.sha256(code.encode()).hexdigest()[:12]
