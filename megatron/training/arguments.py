"""The command line, generated from the configuration dataclasses by tyro.

Every field that a command line can say becomes a flat flag under Megatron-LM's name, grouped in ``--help`` by its
dataclass, with the field's docstring and its default. tyro parses into plain mirrors of the dataclasses, made here,
and the real classes are built from them afterwards: so their checks run once and their messages reach the user as
written. ``--preset`` and ``--load-hf`` swap the model's defaults; flags that are given win.

Errors: tyro draws boxes, and a launcher's log wants one line. So the command line is split into flags here first,
which finds unknown flags (with the nearest name), flags of Megatron that this package lacks
(``megatron_flags.py``), switches with values and switches said both ways; what is left to tyro is the conversion of
values, and its complaint is rewritten as a sentence about that flag. The last of several equal flags wins, so that
a script's "$@" can override.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import difflib
import inspect
import io
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal

import tyro

from megatron.core.models.gpt.presets import PRESETS
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.config import (
    CheckpointConfig,
    DistributedConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.training.data.config import DataConfig
from megatron.training.megatron_flags import ABSENT, ALIASES, ALWAYS, differences
from megatron.training.model_defaults import match_engine, model_defaults

PROGRAM = "pretrain_gpt"
# The product of two, such as steps times batch size, fits into 64 bits. Seeds have a range of their own.
LARGEST_INTEGER = 2**31 - 1
_DESCRIPTION = "\n\n".join(  # tyro keeps no line breaks inside of a paragraph, and wraps none
    (
        "Train a GPT with DeepSeek Sparse Attention.",
        "Flags carry Megatron-LM's names, with dashes or underscores.",
        "The defaults that a preset sets are shown by --preset NAME --help.",
    )
)
_DIRECTORIES = {"save", "load", "load-hf", "log-dir", "tensorboard-dir", "wandb-save-dir"}


@dataclass
class PretrainConfig:
    """Everything that one run is told."""

    model: MLATransformerConfig
    data: DataConfig
    training: TrainingConfig
    validation: ValidationConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    distributed: DistributedConfig
    preset: str | None = None
    notices: tuple[str, ...] = ()


_GROUPS: dict[str, type] = {
    "training": TrainingConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "validation": ValidationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "distributed": DistributedConfig,
    "model": MLATransformerConfig,
}


class CommandLineError(ValueError):
    """A command line that cannot be run; the message is one sentence."""


@dataclass(frozen=True)
class _Flag:
    """One field, as the command line sees it."""

    name: str
    type: Any
    help: str = ""

    @property
    def switch(self) -> bool:
        return self.type is bool

    @property
    def members(self) -> tuple[Any, ...]:
        return typing.get_args(self.type) if _is_union(self.type) else (self.type,)

    @property
    def takes(self) -> str:
        """What a value may be, in words."""
        return " or ".join(_words(member) for member in self.members if member is not type(None))

    def annotation(self, default: Any) -> Any:
        """The type as tyro reads it, with the help text."""
        metavar = None if self.switch else "|".join(_metavar(m) for m in self.members if m is not type(None))
        hint = f"(default: {_shown(default)})"
        return Annotated[self.type, tyro.conf.arg(help=self.help, metavar=metavar, help_behavior_hint=hint)]


def parse_args(arguments: Sequence[str]) -> PretrainConfig:
    """Parse a command line.

    Raises:
        CommandLineError: one sentence; nothing has been created.
        SystemExit: code 0, after ``--help``.
    """
    given = _split(arguments)
    preset = given["preset"][-1] if given.get("preset") else None
    try:
        parsed = _run_tyro(given, model_defaults(given))
        fields = {group: _fields(getattr(parsed, group)) for group in _GROUPS}
        _check_sizes(fields)
        fields["model"], notices = match_engine(fields["model"], given)
        values = {group: cls(**fields[group]) for group, cls in _GROUPS.items()}
    except ValueError as error:
        raise CommandLineError(str(error)) from None
    return PretrainConfig(**values, preset=preset, notices=(*differences(arguments), *notices))


def _fields(mirror: Any) -> dict[str, Any]:
    return {field.name: getattr(mirror, field.name) for field in dataclasses.fields(mirror)}


def _check_sizes(fields: Mapping[str, Mapping[str, Any]]) -> None:
    for group in fields.values():
        for name, value in group.items():
            if name != "seed" and isinstance(value, int) and value > LARGEST_INTEGER:
                flag = "--" + name.replace("_", "-")
                raise CommandLineError(f"{flag} is {value}, but integers go up to {LARGEST_INTEGER}: lower it.")


# ---- from fields to flags ----


@cache
def _flags(cls: type) -> dict[str, _Flag]:
    """The flags of a dataclass by field name; fields that no command line can say are left out."""
    hints, docs = typing.get_type_hints(cls), _field_docstrings(cls)
    flags = {}
    for field in dataclasses.fields(cls):
        kind = _command_line_type(hints[field.name])
        if kind is not None and field.init:
            flags[field.name] = _Flag(field.name.replace("_", "-"), kind, docs.get(field.name, ""))
    return flags


@cache
def _known() -> dict[str, _Flag]:
    """Every spelling of a flag, without the dashes in front."""
    known = {"preset": _Flag("preset", str), "help": _Flag("help", bool)}
    for cls in _GROUPS.values():
        for flag in _flags(cls).values():
            assert flag.name not in known, f"two configuration classes have a field {flag.name}"
            known[flag.name] = flag
    switches = [flag for flag in known.values() if flag.switch and flag.name != "help"]
    return known | {f"no-{flag.name}": flag for flag in switches}


def _field_docstrings(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, doc in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs


def _shown(value: Any) -> str:
    """A default in the way that the command line takes it; runs of equal numbers are folded."""
    if value is None or value == ():
        return "none"
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return "+".join(f"[{item}]*{len(list(run))}" for item, run in itertools.groupby(value))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _command_line_type(kind: Any) -> Any:
    """The part of a type that a command line can say, or None."""
    if _is_union(kind):
        members = [m for m in map(_command_line_type, typing.get_args(kind)) if m is not None]
        return typing.Union[tuple(members)] if set(members) - {type(None)} else None  # noqa: UP007
    plain = kind in (int, float, str, bool, type(None)) or typing.get_origin(kind) is Literal
    if plain or (typing.get_origin(kind) in (list, tuple) and all(map(_command_line_type, _item_types(kind)))):
        return kind
    return None


def _item_types(kind: Any) -> list[Any]:
    return [item for item in typing.get_args(kind) if item is not Ellipsis]


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (list, tuple):
        return f"a list ({_words(_item_types(kind)[0])} each)"
    return {int: "an integer", float: "a number", bool: "True or False"}.get(kind, "a text")


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if typing.get_origin(kind) in (list, tuple):
        return f"{_metavar(_item_types(kind)[0])} ..."
    return "{True,False}" if kind is bool else kind.__name__.upper()


# ---- from the command line to flags ----


def _split(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Flags with their values; the last of several equal flags counts."""
    given: dict[str, list[str]] = {}
    values: list[str] | None = None
    for token in _expand_aliases(arguments):
        if not _looks_like_flag(token):
            if values is None:
                raise CommandLineError(f"{token!r} belongs to no flag: put a flag before it, see --help.")
            values.append(token)
            continue
        name, separator, value = ("--help" if token == "-h" else token).lstrip("-").partition("=")
        name = name.replace("_", "-")
        values = [value] if separator else []
        if _check_known(token, name):
            given[name] = values
    for name, flag_values in given.items():
        _check_values(name, flag_values, given)
    return given


def _expand_aliases(arguments: Sequence[str]) -> list[str]:
    expanded: list[str] = []
    for token in arguments:
        name = token[2:].replace("_", "-") if token.startswith("--") else ""
        head, separator, value = name.partition("=")
        target = () if head in _known() else ALIASES.get(head, ())
        if not target:
            expanded.append(token)
            continue
        expanded += target
        if separator:
            expanded.append(value)
    return expanded


def _looks_like_flag(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not re.match(r"-\.?\d", token)


def _check_known(token: str, name: str) -> bool:
    """Refuse what is no flag; False for one that asks for what is so anyway."""
    if token == "-h" or re.match("--[^-]", token):
        if name in _known() or name in ALWAYS:
            return name in _known()
    if name in ABSENT:
        raise CommandLineError(f"--{name}: {ABSENT[name]}.")
    candidates = [*_known(), *ALIASES]
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    advice = f"did you mean --{near[0]}?" if near else "see --help for all flags."
    raise CommandLineError(f"{token.partition('=')[0]} is no flag of this program: {advice}")


def _check_values(name: str, values: list[str], given: dict[str, list[str]]) -> None:
    flag = _known()[name]
    if flag.switch:
        if values:
            raise CommandLineError(
                f"--{name} is a switch, but it was followed by {values[0]!r}: give --{name} or its opposite alone."
            )
        if f"no-{name}" in given:
            raise CommandLineError(f"--{name} and --no-{name} contradict each other: give one of them.")
        return
    if not values:
        raise CommandLineError(f"--{name} has no value: give {flag.takes}.")
    if "" in values:
        what = "a directory" if name in _DIRECTORIES else flag.takes
        raise CommandLineError(f"--{name} is empty: give {what}, or drop it.")
    if len(values) > 1 and not any(typing.get_origin(member) in (list, tuple) for member in flag.members):
        raise CommandLineError(f"--{name} takes {flag.takes}, but {len(values)} values were given: {' '.join(values)}.")
    if list[int] in flag.members and len(values) == 1 and values[0][:1] in ("[", "("):
        values[:] = [str(item) for item in _list_expression(name, values[0])]


def _list_expression(name: str, text: str) -> list[int]:
    """Megatron's list expressions: "[0]*3+[1]*75"."""

    def evaluate(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [evaluate(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = evaluate(node.left), evaluate(node.right)
            return left + right if isinstance(node.op, ast.Add) else left * right
        raise ValueError(text)

    try:
        items = evaluate(ast.parse(text.strip(), mode="eval").body)
        if not isinstance(items, list) or not all(isinstance(item, int) for item in items):
            raise ValueError(text)
    except (SyntaxError, TypeError, ValueError, MemoryError, OverflowError, RecursionError):
        raise CommandLineError(
            f"--{name} is {text!r}, which is no list of integers: write it like 0 1 1, [0,1,1] or [0]*1+[1]*2."
        ) from None
    return items


# ---- tyro ----


def _run_tyro(given: dict[str, list[str]], model: MLATransformerConfig | None) -> Any:
    tokens = [token for name, values in given.items() for token in (f"--{name}", *values)]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                _schema(model),
                prog=PROGRAM,
                description=_DESCRIPTION,
                args=tokens,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
    raise CommandLineError(_rewrite(complaint.getvalue(), given))


def _schema(model: MLATransformerConfig | None) -> type:
    """One plain dataclass whose fields mirror the groups; ``model`` holds the defaults of the model's flags."""
    defaults = {"model": model} if model else {}
    preset_help = f"Model whose defaults to start from: {', '.join(PRESETS)}."
    preset_arg = tyro.conf.arg(help=preset_help, metavar="NAME", help_behavior_hint="")
    fields: list[Any] = [("preset", Annotated[str | None, preset_arg], None)]
    for group, cls in _GROUPS.items():
        mirror = _mirror(cls, defaults.get(group))
        fields.append((group, mirror, dataclasses.field(default_factory=mirror)))
    return dataclasses.make_dataclass("Arguments", fields)


def _mirror(cls: type, defaults: Any) -> type:
    """The flags of ``cls`` as a dataclass without checks; its docstring heads the group."""
    declared = {field.name: field for field in dataclasses.fields(cls)}
    fields: list[Any] = []
    for name, flag in _flags(cls).items():
        value = getattr(defaults, name) if defaults is not None else declared[name].default
        if value is dataclasses.MISSING:
            factory = declared[name].default_factory
            assert callable(factory), f"{cls.__name__}.{name} has no default"
            value = factory()
        fields.append((name, flag.annotation(value), dataclasses.field(default_factory=partial(copy.copy, value))))
    mirror = dataclasses.make_dataclass(cls.__name__, fields)
    mirror.__doc__ = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0]
    return mirror


def _rewrite(complaint: str, given: dict[str, list[str]]) -> str:
    """tyro's box as one sentence about the flag that it names."""
    named = re.search(r"--([a-z0-9][a-z0-9_-]*)", complaint)
    name = named.group(1) if named else ""
    if name in given and name in _known():
        return f"--{name} takes {_known()[name].takes}, but {' '.join(given[name])!r} was given."
    words = re.sub(r"[^\x20-\x7e]+", " ", complaint).split()
    return " ".join(words) or "the command line could not be read; see --help."
