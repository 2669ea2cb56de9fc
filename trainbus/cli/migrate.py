"""``trainbus migrate``: move code that uses trainbus 0.2 to the names of this version."""

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from trainbus.cli.common import say
from trainbus.cli.renames import CLASSES, COMMON, FUNCTIONS, HOMES, MEDIA, MEMBERS, MODULES, OPTIONS
from trainbus.eventloop.errors import ConfigurationError

_UNIQUE: Final = {name for names in MEMBERS.values() for name in names if "_" in name} - COMMON | {*MEDIA}
"""Names that no other library has: those of an unknown object are told."""
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?:python|py)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


class Edit(NamedTuple):
    """A part of a text, in bytes from ``start`` to ``end``, and what stands there instead."""

    start: int
    end: int
    text: str


class Undecided(NamedTuple):
    """A place that the user has to look at."""

    line: int
    what: str


def migrate(*files: Path, write: bool = False) -> int:
    """Move code of trainbus 0.2 to the names of this version, and print what changes.

    Python files, notebooks, and the Python in Markdown. Comments and formatting stay. What cannot be decided is printed with
    file and line; then the exit status is 1.

    Args:
        files: files, or folders with such files in them.
        write: change the files.
    """
    changed = left = 0
    for path in _all(files):
        before = path.read_bytes()
        after, undecided = migrated(before, path)
        if after != before:
            changed += 1
            old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
            sys.stdout.writelines(difflib.unified_diff(old, new, str(path), str(path)))
            if write:
                path.write_bytes(after)
        for one in undecided:
            left += 1
            say(f"{path}:{one.line}: {one.what}")
    done = "changed" if write else "to change; --write does it"
    say(f"{changed} {'file' if changed == 1 else 'files'} {done}" + (f"; {left} places to look at, above" if left else ""))
    return int(left > 0)


def migrated(text: bytes, path: Path) -> tuple[bytes, list[Undecided]]:
    """Return the text of a file with the names of this version, and what could not be decided."""
    own = frozenset(name for name in MODULES if "." not in name and _stands_beside(path, name))
    if path.suffix == ".md":
        return _blocks(text, own)
    return _notebook(text, own) if path.suffix == ".ipynb" else _code(text, own)


def _all(files: Iterable[Path]) -> Iterator[Path]:
    for path in files:
        if path.is_dir():
            yield from sorted(one for kind in ("py", "md", "ipynb") for one in path.rglob(f"*.{kind}"))
        elif path.suffix in (".py", ".md", ".ipynb"):
            yield path
        else:
            raise ConfigurationError(f"{path}: migrate reads .py, .md and .ipynb")


def _stands_beside(path: Path, name: str) -> bool:
    return path.with_name(name).is_dir() or path.with_name(f"{name}.py").is_file()


def _blocks(text: bytes, own: frozenset[str]) -> tuple[bytes, list[Undecided]]:
    """Move the blocks of Python in Markdown."""
    page, undecided = text.decode(), list[Undecided]()
    kinds: dict[str, str] = {}  # a later block uses what an earlier one made

    def block(found: re.Match[str]) -> str:
        indent, code = found["indent"], found["code"]
        lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
        try:
            after, left = _code("".join(lines).encode(), own, kinds)
        except SyntaxError:  # an excerpt
            return found[0]
        first = page.count("\n", 0, found.start("code"))
        undecided.extend(one._replace(line=one.line + first) for one in left)
        moved = "".join(indent + line if line.strip() else line for line in after.decode().splitlines(keepends=True))
        return found[0].replace(code, moved, 1) if code else found[0]

    return _FENCE.sub(block, page).encode(), undecided


def _notebook(text: bytes, own: frozenset[str]) -> tuple[bytes, list[Undecided]]:
    """Move the cells of a notebook."""
    content, undecided, kinds = json.loads(text), list[Undecided](), dict[str, str]()
    indent = next((indent for indent in (1, 2, 4, None) if _written(content, indent) == text.rstrip()), 1)
    for cell in (one for one in content["cells"] if one["cell_type"] == "code"):
        source = "".join(cell["source"])
        try:
            after, left = _code(source.encode(), own, kinds)
        except SyntaxError:  # a magic command
            continue
        for one in left:
            line = json.dumps(source.splitlines(keepends=True)[one.line - 1], ensure_ascii=False)
            undecided.append(one._replace(line=text.count(b"\n", 0, max(text.find(line.encode()), 0)) + 1))
        if after.decode() != source:
            cell["source"] = after.decode().splitlines(keepends=True)
    end = text[len(text.rstrip()) :]
    return _written(content, indent) + end, undecided


def _written(notebook: object, indent: int | None) -> bytes:
    return json.dumps(notebook, indent=indent, ensure_ascii=False).encode()


def _code(text: bytes, own: frozenset[str], kinds: dict[str, str] | None = None) -> tuple[bytes, list[Undecided]]:
    kinds = {} if kinds is None else kinds
    while True:
        mover = _Mover(text, own, kinds)
        mover.move()
        if not mover.edits:
            return text, sorted(mover.undecided)
        for edit in sorted(mover.edits, reverse=True):
            text = text[: edit.start] + edit.text.encode() + text[edit.end :]


class _Mover(ast.NodeVisitor):
    """Find what to change in one module.

    Args:
        text: the source.
        own: old names of modules that the user has, too.
        kinds: what names are bound to: ``"run"``, ``"loop"`` or ``"bus"``; grows.
    """

    def __init__(self, text: bytes, own: frozenset[str], kinds: dict[str, str]) -> None:
        self.text, self.own, self.kinds = text, own, kinds
        self.edits: list[Edit] = []
        self.undecided: list[Undecided] = []
        self._needed: dict[str, set[str]] = {}  # names to import, by module; none for the module itself
        self._bound: set[str] = set()  # names of the module that are not trainbus's
        self._imports: list[ast.ImportFrom | ast.Import] = []
        self._roots: set[str] = set()  # old modules that are used by their full names
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def move(self) -> None:
        """Fill ``edits`` and ``undecided``."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)
        self._add_imports(tree)

    # ------------------------------------------------------------------------------------------------------- objects

    def _bind(self, node: ast.AST) -> None:
        """Note what a statement makes a run, a loop or a bus, and the names that it binds."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._bound.add(node.name)
            case ast.Import() if any(alias.name in MODULES for alias in node.names):
                whole = [alias.name for alias in node.names if not alias.asname]
                self._roots |= {name.partition(".")[0] for name in whole if self._module(name, None) != name}
            case ast.Import() | ast.ImportFrom() if not _is_ours(getattr(node, "module", None) or ""):
                self._bound |= {alias.asname or alias.name for alias in node.names}
        pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
        match node:
            case ast.Assign():
                pairs = [(target, node.value) for target in node.targets]
            case ast.AnnAssign() | ast.NamedExpr():
                pairs = [(node.target, node.value)]
            case ast.withitem():
                pairs = [(node.optional_vars, node.context_expr)]
        for target, value in pairs:
            name = _name(target)
            if name and isinstance(value, ast.Call) and (kind := CLASSES.get(_name(value.func).rpartition(".")[2])):
                self.kinds[name] = kind

    def _kind(self, node: ast.expr) -> str:
        """Return what an expression is: ``"run"``, ``"loop"``, ``"bus"``, or "" if that is unknown."""
        match node:
            case ast.Call():
                return CLASSES.get(_name(node.func).rpartition(".")[2], "")
            case ast.NamedExpr():
                return self._kind(node.value) or self._kind(node.target)
            case ast.IfExp():
                return self._kind(node.body) or self._kind(node.orelse)
        name = _name(node)
        last = name.rpartition(".")[2].lstrip("_")
        return self.kinds.get(name) or (last if last in MEMBERS else "")

    # --------------------------------------------------------------------------------------------------------- names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Rename a member."""
        if self._rename_module(node):
            return
        self.generic_visit(node)
        kind = self._kind(node.value)
        if new := MEMBERS.get(kind, {}).get(node.attr):
            self._replace_attribute(node, new)
        elif node.attr in _UNIQUE and not _name(node.value).endswith(".checkpoints"):
            self._tell(node, f".{node.attr} of an object that may be a run or a loop: rename it by hand")

    def visit_Name(self, node: ast.Name) -> None:
        """Rename a module."""
        self._rename_module(node)

    def _rename_module(self, node: ast.Attribute | ast.Name) -> bool:
        name = _name(node)
        new = MODULES.get(name) if name.partition(".")[0] in self._roots else None
        if new is not None:
            self.edits.append(Edit(self._at(*_start(node)), self._end(node), new))
        return new is not None

    def visit_Constant(self, node: ast.Constant) -> None:
        """Tell of a name in a text, as for ``getattr``."""
        if isinstance(node.value, str) and node.value in _UNIQUE:
            self._tell(node, f"the text {node.value!r} is the old name of a member")

    def visit_Call(self, node: ast.Call) -> None:
        """Change a call whose arguments are others now."""
        function = node.func
        if isinstance(function, ast.Attribute):
            kind = self._kind(function.value)
            if kind in ("run", "") and function.attr in MEDIA and node.args:
                self._report(node, function)
                return
            if kind == "bus" and function.attr in FUNCTIONS:
                self._call_function(node, function)
                return
        is_attach = _name(function) == "trainbus.attach" or (_name(function) == "attach" and "attach" in self._known())
        if is_attach and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
            at = self._at(*_start(node.args[0]))
            made = self._import("trainbus", "Bus") if isinstance(function, ast.Name) else "trainbus.Bus"
            self.edits.append(Edit(at, at, f"{made}(), "))
        for keyword in node.keywords:
            called = _name(function).rpartition(".")[2]
            if keyword.arg and (new := OPTIONS.get(called, {}).get(keyword.arg)):
                start = self._at(keyword.lineno, keyword.col_offset)
                self.edits.append(Edit(start, start + len(keyword.arg.encode()), new))
        self.generic_visit(node)

    def _report(self, node: ast.Call, function: ast.Attribute) -> None:
        """``run.report_image(name, value)`` → ``run.report(name=Image(value))``."""
        name, *values = node.args
        value = MEDIA[function.attr]
        if isinstance(name, ast.Starred) or any(one.arg == "name" for one in node.keywords) or not (values or node.keywords):
            self._tell(node, f"run.{function.attr}(...) is run.report(NAME={value}(...)) now: change it by hand")
            return
        value = self._import("trainbus.media", value)
        rest = self._source(self._at(*_start(values[0] if values else node.keywords[0])), self._end(node) - 1)
        plain = isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier()
        entry = f"**{{{self._source(self._at(*_start(name)), self._end(name))}: {value}({rest})}}"
        if plain and isinstance(name, ast.Constant):
            entry = f"{name.value!s}={value}({rest})"
        self.edits.append(Edit(self._dot(function), self._end(node), f".report({entry})"))
        self.visit(function.value)

    def _call_function(self, node: ast.Call, function: ast.Attribute) -> None:
        """``bus.attach(trainer)`` → ``attach(bus, trainer)``."""
        start, dot = self._at(*_start(node)), self._dot(function)
        arguments = self._source(self.text.index(b"(", self._end(function)) + 1, self._end(node))
        value = self._source(start, dot).rstrip()
        if isinstance(function.value, ast.NamedExpr | ast.IfExp):
            value = value[1:-1]  # it needs no brackets of its own any more
        comma = ", " if node.args or node.keywords else ""
        called = self._import(FUNCTIONS[function.attr], function.attr)
        self.edits.append(Edit(start, self._end(node), f"{called}({value}{comma}{arguments}"))

    # ------------------------------------------------------------------------------------------------------- imports

    def visit_Import(self, node: ast.Import) -> None:
        """Rename a module."""
        self._imports.append(node)
        for alias in node.names:
            new = self._module(alias.name, node)
            if new != alias.name:
                start = self._at(*_start(alias))
                self.edits.append(Edit(start, start + len(alias.name), new))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Import each name from the module that has it now."""
        self._imports.append(node)
        old = node.module or ""
        new = self._module(old, node)
        if node.level or not f"{new}.".startswith("trainbus."):
            return
        moved: dict[str, list[str]] = {}
        for alias in node.names:
            home = new if alias.name == "*" else _home(new, alias.name)
            if not home:
                self._tell(node, f"{old} has no {alias.name} any more: see the CHANGELOG")
            moved.setdefault(home or new, []).append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if [*moved] == [old]:
            return
        start, end = self._at(*_start(node)), self._end(node)
        if [*moved] == [new]:  # the names stay as they stand
            at = self.text.index(old.encode(), start)
            self.edits.append(Edit(at, at + len(old), new))
            return
        if b"#" in self.text[start:end]:
            self._tell(node, f"write this import anew: {'; '.join(_imported(moved, ''))}")
            return
        indent = "\n" + " " * node.col_offset
        self.edits.append(Edit(start, end, indent.join(_imported(moved, " " * node.col_offset))))

    def _module(self, old: str, node: ast.AST | None) -> str:
        for name, new in MODULES.items():
            if old == name or old.startswith(f"{name}."):
                if name.partition(".")[0] in self.own:
                    if node is not None:
                        self._tell(node, f"{name} may be your own module, which stands beside this file, or {new}")
                    return old
                return new + old.removeprefix(name)
        return old

    def _add_imports(self, tree: ast.Module) -> None:
        """Import what is new after the first import at the top of the module, of trainbus if there is one."""
        if not self._needed:
            return
        there = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Import)]
        ours = [node for node in there if isinstance(node, ast.ImportFrom) and _is_ours(node.module or "")]
        for module, names in self._needed.items():
            if module in self._bound or (names and not (names := names - self._known())):
                continue
            missing = sorted(names)
            same = [node for node in ours if node.module == module and b"(" not in self._bytes(node)]
            if missing and same and not self._changes(same[0]):
                names = {*missing, *(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in same[0].names)}
                made = f"from {module} import {', '.join(sorted(names, key=_isort))}"
                self.edits.append(Edit(self._at(*_start(same[0])), self._end(same[0]), made))
                continue
            line = f"from {module} import {', '.join(missing)}\n" if missing else f"import {module}\n"
            after = (ours or there)[-1] if ours or there else None
            at = self._starts[(after.end_lineno or 1)] if after else self._starts[_behind_docstring(tree)]
            if after and at == len(self.text) and not self.text.endswith(b"\n"):
                line = "\n" + line.rstrip()
            self.edits.append(Edit(at, at, line if after else f"{line}\n"))

    def _changes(self, node: ast.stmt) -> bool:
        return any(edit.start < self._end(node) and edit.end > self._at(*_start(node)) for edit in self.edits)

    def _import(self, module: str, name: str) -> str:
        """Import a name; return what to write for it, with its module if the program has another object of that name."""
        if name in self._bound:
            self._needed.setdefault(module, set())
            return f"{module}.{name}"
        self._needed.setdefault(module, set()).add(name)
        return name

    def _known(self) -> set[str]:
        """Return the names that are imported from trainbus."""
        found = [node for node in self._imports if isinstance(node, ast.ImportFrom) and _is_ours(node.module or "")]
        return {alias.asname or alias.name for node in found for alias in node.names}

    # ----------------------------------------------------------------------------------------------------- positions

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def _dot(self, node: ast.Attribute) -> int:
        return self.text.rindex(b".", 0, self._end(node) - len(node.attr.encode()))

    def _source(self, start: int, end: int) -> str:
        return self.text[start:end].decode()

    def _bytes(self, node: ast.stmt) -> bytes:
        return self.text[self._at(*_start(node)) : self._end(node)]

    def _replace_attribute(self, node: ast.Attribute, new: str) -> None:
        self.edits.append(Edit(self._end(node) - len(node.attr.encode()), self._end(node), new))

    def _tell(self, node: ast.AST, what: str) -> None:
        self.undecided.append(Undecided(getattr(node, "lineno", 1), what))


def _name(node: ast.AST | None) -> str:
    """Return the dotted name that an expression is; "" for any other one."""
    if isinstance(node, ast.Attribute):
        inner = _name(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _start(node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "trainbus" or module in MODULES


def _behind_docstring(tree: ast.Module) -> int:
    first = tree.body[0] if tree.body else None
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return (first.end_lineno or 0) if is_text and first is not None else 0


def _home(module: str, name: str) -> str:
    """Return the module that has a name now, first of all ``module``; "" if none has."""
    for one in (module, *HOMES):
        with suppress(ImportError):
            if hasattr(import_module(one), name) or find_spec(f"{one}.{name}"):
                return one
    return ""


def _isort(name: str) -> tuple[int, str]:
    """Sort names as most tools sort imports: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _imported(moved: Mapping[str, list[str]], indent: str) -> list[str]:
    """Return the lines of import statements."""
    lines = []
    for module, names in sorted(moved.items()):
        line = f"from {module} import {', '.join(sorted(names, key=_isort))}"
        if len(indent + line) > 100:
            inner = "".join(f"{indent}    {name},\n" for name in sorted(names, key=_isort))
            line = f"from {module} import (\n{inner}{indent})"
        lines.append(line)
    return lines
