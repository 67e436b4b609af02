"""The tree's budgets as functions of (path, source), so that a test can show each one failing on a made-up file.

Every check returns sentences, one a violation, and an empty list for a clean file. Paths are relative to the
repository root. Function length counts from the `def` line to the last line, docstring included; parameters count
without self, cls and an autograd function's ctx. Branches and statements are ruff's to count (C901, PLR0915): the
budget test runs it with the repository's own settings.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DSA = "megatron/core/transformer/experimental_attention_variant/dsa"

FILE_LINES = 400
FUNCTION_LINES = 60
LAUNCHER_LINES = 90
PARAMETERS = 7
ATTENTION_LINES = 120

# Signatures that Megatron-LM's callers already use, so their length is not ours to choose.
MEGATRON_SIGNATURES = {
    f"{DSA}/attention.py": {"DSAttention.__init__", "DSAttention.forward"},
    "megatron/core/models/gpt/gpt_model.py": {"GPTModel.__init__", "GPTModel.forward"},
}

# Inside dsa/: who may use the rest of the tree, and what else may be imported where.
TREE_USERS = {f"{DSA}/indexer.py", f"{DSA}/attention.py"}
KERNEL_FOLDER = f"{DSA}/backends/cudnn/"
KERNEL_PACKAGES = {"cuda", "cudnn", "cutlass", "flash_mla", "sgl_flash_mla", "triton"}

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionDef]]:
    """Yield (qualified name, node) for every function, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def parameter_count(node: FunctionDef) -> int:
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    bound = 1 if names[:1] in (["self"], ["cls"], ["ctx"]) else 0
    return len(names) - bound + len(args.kwonlyargs) + (args.vararg is not None) + (args.kwarg is not None)


def is_kernel_launcher(path: str, node: FunctionDef) -> bool:
    """Kernels and their launchers, in the kernel folder alone: one list of tile sizes and strides has to stay whole."""
    if not path.startswith(KERNEL_FOLDER):
        return False
    return node.name.startswith("launch_") or any("jit" in ast.unparse(d) for d in node.decorator_list)


def check_lengths(path: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    limit = ATTENTION_LINES if path == f"{DSA}/attention.py" else FILE_LINES
    found = [f"{path}: {lines} lines, at most {limit}."] if lines > limit else []
    for name, node in functions(ast.parse(source)):
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        limit = LAUNCHER_LINES if is_kernel_launcher(path, node) else FUNCTION_LINES
        if length > limit:
            found.append(f"{path}: {name} has {length} lines, at most {limit}.")
    return found


def check_parameters(path: str, source: str) -> list[str]:
    allowed = MEGATRON_SIGNATURES.get(path, set())
    return [
        f"{path}: {name} has {parameter_count(node)} parameters, at most {PARAMETERS}."
        for name, node in functions(ast.parse(source))
        if parameter_count(node) > PARAMETERS
        and name not in allowed
        # A Triton kernel's parameters are its pointers, sizes and tile constants.
        and not (is_kernel_launcher(path, node) and node.decorator_list)
    ]


def imported_modules(path: str, source: str) -> Iterator[str]:
    """Yield absolute names of what a file imports, relative imports resolved."""
    package = Path(path).parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module])))


def check_dsa_imports(path: str, source: str) -> list[str]:
    """dsa/ must move to another Megatron tree as a folder: torch, the standard library and itself."""
    if not path.startswith(DSA + "/"):
        return []
    third_party = {"torch"} | (KERNEL_PACKAGES if path.startswith(KERNEL_FOLDER) else set())
    dsa_module = DSA.replace("/", ".")
    found = []
    for module in imported_modules(path, source):
        root = module.split(".")[0]
        if root == "megatron":
            if module != dsa_module and not module.startswith(dsa_module + ".") and path not in TREE_USERS:
                found.append(f"{path}: imports {module}, but only indexer.py and attention.py may leave dsa/.")
        elif root not in sys.stdlib_module_names | third_party:
            found.append(f"{path}: imports {module}, which dsa/ cannot take along.")
    return found


def check_suppressions(path: str, source: str) -> list[str]:
    """A `noqa` may excuse a public signature (PLR0913); it may not excuse branches or statements."""
    pattern = re.compile(r"#\s*noqa(?!:\s*[A-Z])|#\s*noqa:.*\b(?:C901|PLR0915)\b|#\s*ruff:\s*noqa")
    return [
        f"{path}:{number}: silences a budget."
        for number, line in enumerate(source.splitlines(), start=1)
        if pattern.search(line)
    ]


# Each spelt with a one-letter class, so that this file passes its own check.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~])/(?:[w]ork|[t]mp|[o]pt|[r]oot|[h]ome)/\w"),
    "a package registry's host": re.compile(
        r"p[y]pi\.(?:org|nvidia|ngc)|python[h]osted\.org|download\.p[y]torch\.org|npm[j]s\.org|deb\.[d]ebian"
    ),
}


def check_words(path: str, source: str) -> list[str]:
    return [
        f"{path}:{number}: names {what}."
        for number, line in enumerate(source.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def check_named_documents(path: str, source: str, tracked: set[str]) -> list[str]:
    """A Markdown file that code or prose names must be in the tree: a reader will look for it."""
    names = {Path(t).name for t in tracked}
    return [
        f"{path}:{number}: names {mention}, which is not in the tree."
        for number, line in enumerate(source.splitlines(), start=1)
        for mention in re.findall(r"[\w-]+\.md\b", line)
        if mention not in names
    ]


def ruff_budget(path: Path) -> list[str]:
    """Complexity and statement counts by ruff, with the repository's settings."""
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    command += ["--select", "C901,PLR0915", "--output-format", "concise", "--quiet", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def tracked_files() -> list[str]:
    """Files of the tree, by git where this is a checkout and by walking the known folders where it is not."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    folders = ["megatron", "tests", "docs", "examples", ".github", ".ci"]
    inside = [p for folder in folders for p in (ROOT / folder).rglob("*") if "__pycache__" not in p.parts]
    return [str(p.relative_to(ROOT)) for p in [*inside, *ROOT.glob("*.*")] if p.is_file()]
