"""Write the tables of configuration.md from the code: `python docs/generate_tables.py`; with --check, only compare.

Options come from the configuration dataclasses (name, default, docstring), gates from the `raise ValueError` statements
of the modules below (condition and message, as written), the tests of gates from the cases that reach them. So
the tables cannot say what the code does not. Needs the `test` extra.
"""

from __future__ import annotations

import ast
import importlib
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
CONFIG = "megatron/core/transformer/transformer_config.py"
DSA_CONFIG = "megatron/core/transformer/experimental_attention_variant/dsa/config.py"
TESTS = {
    CONFIG: "tests/unit_tests/core/transformer/test_transformer_config.py",
    DSA_CONFIG: "tests/unit_tests/core/transformer/experimental_attention_variant/dsa/test_config.py",
}


@dataclass(frozen=True)
class Gate:
    """One refusal: the condition as written, and the message with its values as `{expressions}`."""

    condition: str
    message: str
    line: int


def _message(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_message(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _message(node.value) if isinstance(node.value, ast.Constant) else "{" + _plain(node.value) + "}"
    return "{" + _plain(node) + "}"


def _plain(node: ast.expr) -> str:
    return ast.unparse(node).replace("self.", "")


def _raises(body: list[ast.stmt], condition: str = "always") -> Iterator[Gate]:
    for statement in body:
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            yield Gate(condition, _message(statement.exc.args[0]), statement.lineno)
        elif isinstance(statement, ast.If):
            yield from _raises(statement.body, _plain(statement.test))
            yield from _raises(statement.orelse, condition)
        elif isinstance(statement, ast.For | ast.With | ast.Try):
            yield from _raises(statement.body, condition)


def gates(path: str) -> list[Gate]:
    """Every ValueError that the classes of a module raise, in order."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [gate for function in functions for gate in _raises(function.body)]


@dataclass(frozen=True)
class Option:
    """One field of a configuration class."""

    name: str
    default: str
    help: str


def options(path: str, prefix: str) -> list[Option]:
    """Fields of a module's dataclasses whose name begins with ``prefix``, with the docstring under each."""
    found = []
    classes = [n for n in ast.parse((ROOT / path).read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
    for field, doc in (pair for cls in classes for pair in pairwise(cls.body)):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            if field.target.id.startswith(prefix) and isinstance(doc.value, ast.Constant):
                default = ast.unparse(field.value) if field.value is not None else ""
                found.append(Option(field.target.id, default, " ".join(str(doc.value.value).split())))
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _option_table(path: str, prefix: str) -> str:
    rows = [(f"`--{o.name.replace('_', '-')}`", f"`{o.default}`", o.help) for o in options(path, prefix)]
    return _table(("flag", "default", "what"), rows)


def test_cases(path: str) -> dict[int, list[str]]:
    """Names of the test cases that reach each gate of a module, by the gate's line."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    tests = importlib.import_module(TESTS[path].removesuffix(".py").replace("/", "."))
    build = tests.build if path == CONFIG else lambda overrides: tests.DSAConfig(**(tests.VALID | overrides))
    cases = defaultdict(list)
    for name, (overrides, _) in tests.GATES.items():
        try:
            build(overrides)
        except ValueError as error:
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            cases[line or 0].append(name)
    return cases


def _gate_table(path: str) -> str:
    """The gates with their tests."""
    cases = test_cases(path)
    rows = [(f"`{gate.condition}`", gate.message, ", ".join(cases[gate.line])) for gate in gates(path)]
    return _table(("refused when", "message", "tests"), rows)


def tables() -> dict[str, str]:
    """Every generated table by the name in its markers."""
    return {
        "dsa-options": _option_table(CONFIG, "dsa_"),
        "dsa-gates": _gate_table(DSA_CONFIG),
        "model-gates": _gate_table(CONFIG),
    }


def render(page: str) -> str:
    """The page with each ``<!-- table NAME -->`` ... ``<!-- end -->`` filled in."""
    for name, table in tables().items():
        start, end = f"<!-- table {name} -->\n", "\n<!-- end -->"
        before, _, rest = page.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"configuration.md has no markers for the table {name}: add {start.strip()} and an end.")
        page = before + start + table + end + after
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if "--check" in sys.argv[1:]:
        return int(rendered != page)
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
