"""Names in a configuration: ``module:attribute``, and names of other systems."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from docstring_parser import DocstringStyle, parse

from trainbus.config.read import all_parsed, inside, kind_of, wrong
from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.errors import UnknownNameError
from trainbus.eventloop.registry import add_aliases, register_finder
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.user_errors import add_note


def option_descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of options by name, from ``Args:`` in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for one in cls.__mro__:
        for entry in parse(inspect.cleandoc(one.__doc__ or ""), DocstringStyle.GOOGLE).params:
            for name in entry.arg_name.split(","):  # "beta1, beta2: ..."
                found.setdefault(name.strip().lstrip("*"), " ".join((entry.description or "").split()))
    return found


# -------------------------------------------------------------------------------------------------- module:attribute

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_REFERENCE = re.compile(rf"({_NAME}):({_NAME})")


def is_reference(value: object) -> bool:
    """True for text of the form ``module:attribute``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


class Imports:
    """The modules that a configuration may name, with their submodules. A configuration imports no other module.

    Args:
        modules: names of the modules, as the configuration lists them.
        folders: folders of the user's files, added to the end of the import path. A file hidden by an installed module of the
            same name is an error.

    Raises:
        ConfigurationError: a module does not exist, or another module hides it.
        Exception: importing a module failed; the error has a note.
    """

    def __init__(self, modules: Sequence[str] = (), folders: Sequence[Path] = ()) -> None:
        self._modules = list(modules)
        self._folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        sys.path.extend(str(folder) for folder in self._folders if str(folder) not in sys.path)
        importlib.invalidate_caches()
        for index, name in enumerate(self._modules):
            where = inside("imports", index)
            origin = getattr(self._load(name, where), "__file__", None)
            path = name.replace(".", "/")
            for file in (folder / one for folder in self._folders for one in (f"{path}.py", f"{path}/__init__.py")):
                if file.is_file() and (origin is None or not file.samefile(origin)):
                    shown = origin or "Python itself"
                    raise wrong(where, f"{name!r} is imported from {shown}, which hides {file}; rename your file")

    def resolve(self, reference: str, where: str) -> Any:
        """Return the object that ``module:attribute`` names, from a listed module."""
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise wrong(where, f"{reference!r} is not of the form module:attribute{self._hint(reference)}")
        name, attributes = match.groups()
        if not any(f"{name}.".startswith(f"{listed}.") for listed in self._modules):
            wanted = ", ".join(f'"{one}"' for one in [*self._modules, name])
            there = importlib.util.find_spec(name.partition(".")[0]) is not None
            hint = ("" if there else did_you_mean(name, self._modules)) or f"; add it there: imports = [{wanted}]"
            raise wrong(where, f"{reference!r} is in a module that is not listed under imports{hint}")
        return _attribute(self._load(name, where), attributes, where)

    def _hint(self, text: str) -> str:
        """Return a suggestion for a text that is not a reference, or an example."""
        homes = [name for name in self._modules if text.isidentifier() and hasattr(sys.modules.get(name), text)]
        module, _, name = text.rpartition(".")
        if text not in self._modules and ((homes and not text.startswith("_")) or is_reference(f"{module}:{name}")):
            return f" (did you mean '{homes[0] if homes else module}:{name}'?)"
        return f', such as "{text if text in self._modules else "my_module"}:MyClass"'

    def _load(self, name: str, where: str) -> ModuleType:
        if name.endswith(".py") or "/" in name:
            meant = name.removesuffix(".py").strip("./").replace("/", ".")
            raise wrong(where, f"{name!r} is a file: give the module's name, {meant!r}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise wrong(where, f"{name!r} is not the name of a module, such as my_module or my_package.my_module")
        try:
            return importlib.import_module(name)
        except SyntaxError as error:
            raise wrong(where, f"{name!r} cannot be imported: {error.msg} ({error.filename}, line {error.lineno})") from None
        except SystemExit as end:
            ended = f"{name!r} ended the program by sys.exit({end.code!r}) while it was imported"
            raise wrong(where, f"{ended}: it is a script, not a module") from None
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                add_note(error, f"while importing {name!r} for {where}")
                raise
            hint = did_you_mean(missing, {path.stem for folder in self._folders for path in folder.glob("*.py")})
            folders = f"in {' and '.join(map(str, self._folders))}, and " if self._folders else ""
            searched = f"searched {folders}among the installed modules"
            raise wrong(where, f"module {missing!r} was not found{hint}; {searched}") from None


def _attribute(module: ModuleType, attributes: str, where: str) -> Any:
    found: Any = module
    for name in attributes.split("."):
        if name.startswith("_"):
            raise wrong(where, f"{name!r} is private: a configuration can name public attributes only")
        if not isinstance(found, type) and found is not module:
            raise wrong(where, f"{name!r} cannot be looked up in a {type(found).__name__}, only in a module or class")
        try:
            found = getattr(found, name)
        except AttributeError:
            shown = f"the class {found.__qualname__!r}" if isinstance(found, type) else f"the module {found.__name__!r}"
            hint = did_you_mean(name, [one for one in dir(found) if not one.startswith("_")])
            raise wrong(where, f"{shown} has no {name!r}{hint}") from None
        if inspect.ismodule(found):
            raise wrong(where, f"{name!r} is a module: name an object in it, as {found.__name__}:attribute")
    return found


# ------------------------------------------------------------------------------------- names and options of other systems


class OptionChange(msgspec.Struct, frozen=True):
    """The translation of another system's option for which a new name is not enough."""

    ours: str = ""  # its name in trainbus, or ""
    also: dict[str, Any] = {}  # further trainbus options that it implies
    says_nothing: tuple[Any, ...] | None = (None,)  # values to drop, because they ask for trainbus's behaviour; None: all
    instead: str = ""  # the way out for all other values


class Migration(msgspec.Struct, frozen=True):
    """One hook (or writer) of another system."""

    system: str
    name: str
    ours: tuple[str, ...] = ()  # trainbus's classes for it, the replacement first; empty if there is none
    options: dict[str, str | OptionChange] = {}  # its options, with their names in trainbus or their changes
    preset: dict[str, Any] = {}  # trainbus options that its name implies; given options override them
    note: str = ""  # further differences, or the reason why nothing replaces it
    aliases: tuple[str, ...] = ()
    defaults: dict[str, Any] = {}  # its defaults that differ from trainbus's, for lists that are said to be the system's


class PriorityScale(msgspec.Struct, frozen=True):
    """The priorities of another system."""

    system: str
    key: str  # key of a hook's table that the system uses instead of ``priority``
    names: dict[str, int]  # in capitals


_migrations: dict[str, list[Migration]] = {}
priority_scales: dict[str, PriorityScale] = {}  # the scales of other systems by their keys


def register_migrations(table: Iterable[Migration]) -> None:
    """Let lists of hooks use the names and options of other systems."""
    load_builtin("hooks")  # the classes that get further names
    for entry in table:
        names = (entry.name, *entry.aliases)
        for name in names:
            if entry not in (known := _migrations.setdefault(name, [])):
                known.append(entry)
        if entry.ours:
            add_aliases(entry.ours[0], names)


def _absent(kind: str, name: str) -> str | None:
    """Return why nothing here replaces a hook of another system."""
    return next((f"{entry.system}'s: {entry.note}" for entry in _migrations.get(name, ()) if not entry.ours), None)


register_finder(_absent)


def register_priorities(scale: PriorityScale) -> None:
    """Let tables of hooks give a priority on the scale of another system, under its key."""
    priority_scales[scale.key] = scale


def checked_system(system: str) -> str:
    """Return the name of another system, or an empty one; raise UnknownNameError if it is not one."""
    systems = list(dict.fromkeys(entry.system for entries in _migrations.values() for entry in entries))
    if system and system not in systems:
        hint = did_you_mean(system, systems) or f"; the systems are {', '.join(systems)}"
        raise UnknownNameError(f"system={system!r} is not a system whose hooks are known{hint}")
    return system


def translated(name: str | None, options: Mapping[str, Any], where: str, system: str = "") -> dict[str, Any]:
    """Translate options to trainbus's names if ``name`` is a name in another system. Other options stay unchanged.

    In a list of the ``system``, the name also has the defaults of the system.
    """
    # Of several entries with this name, take the one with most of the options, or without options.
    entries = [one for one in _migrations.get(name or "", ()) if system in ("", one.system)]
    entry = max(entries, key=lambda one: (len(one.options.keys() & options.keys()), not one.options), default=None)
    if entry is None:
        return dict(options)
    ours: dict[str, Any] = {}
    also: dict[str, Any] = {}
    for option, value in options.items():
        change = entry.options.get(option, option)
        change = OptionChange(change) if isinstance(change, str) else change
        theirs = f"{option} of {entry.system}'s {entry.name}"
        if change.ours in ours or (change.ours != option and change.ours in options):
            raise wrong(
                inside(where, option),
                f"{theirs} is called {change.ours} in trainbus, and {change.ours} is given, too; give one",
            )
        if change.ours:
            ours[change.ours] = value
            also |= change.also
        elif change.says_nothing is not None and (value_given := all_parsed(value)) not in change.says_nothing:
            way_out = f"leave it out; {change.instead}"
            raise wrong(inside(where, option), f"{theirs} is not supported, given as {kind_of(value_given)}: {way_out}")
    return (entry.defaults if system else {}) | entry.preset | also | ours
