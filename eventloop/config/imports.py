"""``module:attribute``: names of Python objects in a configuration, from the modules that its author has listed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from eventloop.config.words import did_you_mean, inside, wrong

_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_REFERENCE = re.compile(rf"({_NAME}):({_NAME})")
_DOTTED = re.compile(rf"({_NAME})\.([A-Za-z_]\w*)")


def is_reference(value: object) -> bool:
    """True for text of the form ``module:attribute``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


class Imports:
    """The modules that a configuration may name, with their submodules. No other module is ever imported for it.

    Args:
        modules: their names, as the configuration lists them.
        folders: of the user's files; a file that an installed module of its name hides is an error.

    Raises:
        ConfigurationError: a module is not there, or is hidden by another one.
        Exception: an error of a module that was imported, with a note.
    """

    def __init__(self, modules: Sequence[str] = (), folders: Sequence[Path] = ()) -> None:
        self._modules = list(modules)
        self._folders = list(folders)
        for index, name in enumerate(self._modules):
            where = inside("imports", index)
            self._check_not_hidden(name, self._load(name, where), where)

    def resolve(self, reference: str, where: str) -> Any:
        """Return the object that ``module:attribute`` names.

        Raises:
            ConfigurationError: not of that form, a module that is not listed, or an attribute that is not there.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise wrong(where, f"{reference!r} names nothing: write module:attribute{self._hint(reference)}")
        module_name, attributes = match.groups()
        if not any(module_name == listed or module_name.startswith(f"{listed}.") for listed in self._modules):
            wanted = ", ".join(f'"{name}"' for name in [*self._modules, module_name])
            there = importlib.util.find_spec(module_name.partition(".")[0]) is not None
            hint = ("" if there else did_you_mean(module_name, self._modules)) or f"; add it there: imports = [{wanted}]"
            raise wrong(where, f"{reference!r} is in a module that is not listed under imports{hint}")
        return _descend(self._load(module_name, where), attributes, where)

    def _hint(self, text: str) -> str:
        """Return a correction of a text that is no reference."""
        homes = [name for name in self._modules if text.isidentifier() and hasattr(sys.modules.get(name), text)]
        if homes and not text.startswith("_"):
            return f" (did you mean '{homes[0]}:{text}'?)"
        if text in self._modules:
            return f', such as "{text}:MyClass"'
        match = _DOTTED.fullmatch(text)
        return f" (did you mean '{match[1]}:{match[2]}'?)" if match else ', such as "my_module:MyClass"'

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
            missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{name}.".startswith(f"{missing}."):
                error.add_note(f"while importing {name!r} for {where}")
                raise
            beside = {path.stem for folder in self._folders for path in folder.glob("*.py")}
            folders = f" in {' or '.join(map(str, self._folders))}, nor" if self._folders else ""
            hint = did_you_mean(missing, beside)
            raise wrong(where, f"there is no module {missing!r}{hint}{folders} among the installed ones") from None

    def _check_not_hidden(self, name: str, module: ModuleType, where: str) -> None:
        origin = getattr(module, "__file__", None)
        path = name.replace(".", "/")
        for file in (folder / one for folder in self._folders for one in (f"{path}.py", f"{path}/__init__.py")):
            if file.is_file() and (origin is None or not file.samefile(origin)):
                shown = origin or "a module of Python itself"
                raise wrong(where, f"{name!r} is {shown}, which hides {file}; rename your file")


def _descend(module: ModuleType, attributes: str, where: str) -> Any:
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
            public = [one for one in dir(found) if not one.startswith("_")]
            raise wrong(where, f"{shown} has no {name!r}{did_you_mean(name, public)}") from None
        if inspect.ismodule(found):
            raise wrong(where, f"{name!r} is a module: name an object in it, as {found.__name__}:attribute")
    return found


def find_files_in(*folders: Path) -> list[Path]:
    """Let modules be imported from ``folders``, after all installed ones; return the folders without doubles."""
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    sys.path.extend(str(folder) for folder in unique if str(folder) not in sys.path)
    importlib.invalidate_caches()
    return unique
