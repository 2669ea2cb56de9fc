"""Read configurations: files in TOML, YAML and JSON, and changes such as ``loop.max_epochs=3``; helpers for messages.

Reading returns tables, lists, strings and numbers, and never runs code. Size, depth and repetition are bounded.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from trainbus.eventloop.errors import ConfigurationError, cannot_import
from trainbus.eventloop.spelling import did_you_mean

_LARGEST_FILE = 10_000_000  # bytes
_LARGEST_INTEGER = 10_000  # bits; Python can still write it as a decimal number
_MOST_VALUES = 1_000_000  # in a YAML file after expanding its aliases
_DEEPEST = 100  # levels of nested tables and lists
_TOO_DEEP = f"is nested too deeply; a configuration has at most {_DEEPEST} levels"
_TOO_LONG = "an integer has thousands of digits; put text in quotes"

# YAML 1.2's floats. PyYAML reads YAML 1.1, where 1e-3, the usual form of a learning rate, is text.
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
_STEP = re.compile(r'(?:^|\.)(?:"([^"]+)"|([\w-]+))|\[(-?\d{1,9})\]')
_KEY = re.compile(f"(?:{_STEP.pattern})+")
_CONSTANTS = ("True", "False", "None")  # of Python; TOML and JSON write true, false and null


class FromText(str):
    """A value from the command line, whose option determines its type."""

    __slots__ = ()


def read(path: Path) -> dict[str, Any]:
    """Return the configuration in a ``.toml``, ``.yaml``, ``.yml`` or ``.json`` file.

    Raises:
        ConfigurationError: the file cannot be read, has a syntax error (with line and column), does not hold a table, or a
            value is out of bounds.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        hint = "; run a Python script with python" if path.suffix == ".py" else _neighbours(path)
        raise wrong(str(path), f"a configuration must be a .toml, .yaml or .json file{hint}")
    try:
        text = _text(path)
        found = reader(text) if text.strip() else None
        _check_bounds(found)
    except OSError as error:
        raise wrong(str(path), f"cannot be read: {error.strerror}{_neighbours(path)}") from None
    except (RecursionError, ValueError) as error:  # UnicodeDecodeError and the errors of the readers, too
        raise wrong(str(path), _reason(error)) from None
    if not isinstance(found, dict):
        got = "nothing" if not found else kind_of(found)
        raise wrong(str(path), f"expected a table with model, data, optimizer …, got {got}")
    return found


def _text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise ValueError("is a directory" if path.is_dir() else "is not a file but a device or a pipe")
    if (size := path.stat().st_size) > _LARGEST_FILE:
        raise ValueError(f"is too large for a configuration: {size:,} bytes, at most {_LARGEST_FILE:,}")
    return path.read_text(encoding="utf-8-sig")  # Windows editors begin a file with a byte order mark


def _neighbours(path: Path) -> str:
    """Return the names of the configurations in a folder (or a file's folder), as the end of a message."""
    folder = path if os.path.isdir(path) else path.parent  # noqa: PTH112 - is_dir() raises for a long name
    found = sorted(one.name for one in folder.glob("*") if one.suffix.lower() in SUFFIXES and one.is_file())
    if not found:
        return f"; no configuration is in {folder.absolute()}"
    return did_you_mean(path.name, found) or f"; {folder} has {', '.join(found)}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return _TOO_DEEP
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (at line {error.lineno}, column {error.colno})"
    return _TOO_LONG if "int_max_str_digits" in str(error) else str(error)


def _check_bounds(value: Any) -> None:
    """Raise ValueError for deep nesting, huge integers and keys that are not text."""
    level = [value]
    for _ in range(_DEEPEST):
        if any(isinstance(one, int) and one.bit_length() > _LARGEST_INTEGER for one in level):
            raise ValueError(_TOO_LONG)
        tables = [one for one in level if isinstance(one, dict)]
        for key in (key for table in tables for key in table if isinstance(key, bool | None)):
            raise ValueError(f"the key {key!r} is not text (YAML reads on, off, yes and no as booleans); put it in quotes")
        lists = [one for one in level if isinstance(one, list)]
        level = [inner for one in (*lists, *(table.values() for table in tables)) for inner in one]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _table(entries: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    _check_once(name for name, _ in entries)
    return dict(entries)


def _check_once(names: Iterable[str], at: str = "") -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} appears twice in one table{at}")


def _toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        told = cannot_import("reading YAML", "PyYAML", "yaml", error, "yaml")
        raise ValueError(f"{told}; TOML and JSON need no package") from None
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        if (node := yaml.compose(text, loader)) is None:
            return None
        _check_node(node, {})
        try:
            return loader("").construct_document(node)
        except (AttributeError, KeyError, ValueError) as error:  # such as 2026-13-01, or !!bool maybe
            raise ValueError(f"a value does not match its type: {_reason(error)}") from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"{error.problem}{_at(error.problem_mark)}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _check_node(node: Any, sizes: dict[int, float]) -> float:
    """Return the number of values in a YAML node with its aliases written out; raise ValueError for too many."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = math.inf
    children = node.value if isinstance(node.value, list) else []
    if node.id == "mapping":
        _check_once((key.value for key, _ in children if key.id == "scalar" and key.value != "<<"), _at(node.start_mark))
        children = [value for _, value in children]
    sizes[id(node)] = size = 1 + sum(_check_node(child, sizes) for child in children)
    if size > _MOST_VALUES:
        what = "an alias contains itself" if size == math.inf else f"aliases expand to more than {_MOST_VALUES:,} values"
        raise ValueError(f"{what}{_at(node.start_mark)}")
    return size


def _at(mark: Any) -> str:
    return "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"


_READERS: dict[str, Callable[[str], Any]] = {
    ".toml": _toml,
    ".yaml": _yaml,
    ".yml": _yaml,
    ".json": partial(json.loads, object_pairs_hook=_table),
}
SUFFIXES = tuple(_READERS)

# ----------------------------------------------------------------------------------------------------------- changes


def override(config: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return ``config`` with changes such as ``custom_hooks[0].interval=5``. Each option determines the type of its value.

    Missing tables are created. A change of an option turns a name (``model = "mine:network"``) into a table with that
    ``type``.

    Raises:
        ConfigurationError: a change is not written as ``key=value``, or its key does not fit into ``config``.
    """
    changed = deepcopy(config)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigurationError(f"{shortened(change)!r}: changes are written as key=value, such as loop.max_epochs=3")
        value = FromText(text.strip())
        try:
            _check_bounds(parsed(value))
        except (RecursionError, ValueError) as error:
            raise wrong(key, _reason(error)) from None
        _put(changed, _steps(key.strip()), value)
    return changed


def parsed(value: Any) -> Any:
    """Return ``value``; parse text from the command line as TOML, JSON or Python, or else keep it as plain text."""
    if not isinstance(value, FromText):
        return value
    for parser in (lambda text: _toml(f"value = {text}")["value"], json.loads, _python):
        with suppress(ValueError):
            return parser(value)
    return str(value)


def _python(text: str) -> Any:
    """Parse ``True``, ``False``, ``None``, and lists, tuples and dicts of Python; a tuple becomes a list."""
    if text not in _CONSTANTS and text[:1] not in ("[", "(", "{"):
        raise ValueError
    try:
        return json.loads(json.dumps(ast.literal_eval(text)))
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError from error


def all_parsed(value: Any) -> Any:
    """Parse all text from the command line in a value."""
    if isinstance(value, dict):
        return {key: all_parsed(entry) for key, entry in value.items()}
    return [all_parsed(entry) for entry in value] if isinstance(value, list) else parsed(value)


def _steps(key: str) -> list[str | int]:
    steps = [int(index) if index else quoted or name for quoted, name, index in _STEP.findall(key)]
    if not _KEY.fullmatch(key) or isinstance(steps[0], int) or len(steps) > _DEEPEST:
        raise ConfigurationError(
            f"{shortened(key)!r} is not a configuration key; write it like loop.max_epochs or custom_hooks[0].interval"
        )
    return steps


def _put(table: Any, steps: list[str | int], value: FromText) -> None:
    where = ""
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        container, where = where, inside(where, step)
        if isinstance(step, int):
            if not isinstance(table, list):
                missing = "is not in the configuration" if table is None else f"is {kind_of(table)}, not a list"
                raise wrong(where, f"{container} {missing}")
            if not -len(table) <= step < len(table):
                raise wrong(where, f"{container} has {len(table)} entries, counted from 0")
        elif not isinstance(table, dict):
            hint = f"; its first entry is {container}[0]" if isinstance(table, list) else ""
            raise wrong(where, f"{container} is {kind_of(table)}, not a table{hint}")
        if following is None:
            table[step] = value
            return
        found = table[step] if isinstance(step, int) else table.get(step)
        if isinstance(following, str) and (found is None or found is False):
            found = table[step] = {}
        elif isinstance(following, str) and isinstance(found, str):
            found = table[step] = {"type": found}
        table = found


# ----------------------------------------------------------------------------------------------------- words of messages


def inside(where: str, key: str | int) -> str:
    """Return the position of an entry of the table or list at ``where``."""
    if isinstance(key, int):
        return f"{where}[{key}]"
    shown = key if re.fullmatch(r"[\w-]+", key) else f'"{key}"'
    return f"{where}.{shown}" if where else shown


def wrong(where: str, message: str) -> ConfigurationError:
    """Return the error for the value at ``where``."""
    return ConfigurationError(f"{where}: {message}" if where else message)


def shortened(text: str, most: int = 80) -> str:
    """Cut a text for a message to ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}…"


def kind_of(value: Any) -> str:
    """Return the type of a value, and the value if it is short: ``str 'ten'``, ``a table``."""
    if isinstance(value, dict | list | tuple):
        return "a table" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"str {shortened(str(value))!r}"
    return f"{type(value).__name__} {value!r}" if isinstance(value, bool | int | float) else shortened(repr(value))


def check_keys(
    table: Mapping[str, object], known: Iterable[str], where: str, whose: str, *, further: Iterable[str] = ()
) -> None:
    """Raise ConfigurationError for a key of ``table`` that is not in ``known``.

    ``whose`` names the owner of the keys; ``further`` are keys of other tables to suggest.
    """
    names = list(dict.fromkeys(known))
    for key in table:
        if key not in names:
            hint = did_you_mean(str(key), names) or did_you_mean(str(key), further)
            there = f"; its options are {', '.join(names)}" if names else "; it has no options"
            raise wrong(inside(where, str(key)), f"{whose} has no option {str(key)!r}{hint or there}")
