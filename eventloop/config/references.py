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

from eventloop.config.places import inside, wrong
from eventloop.config.registry import did_you_mean

_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w*)")


def is_reference(value: object) -> bool:
    """True for text of the form ``module:attribute``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


class Imports:
    """The modules that a configuration may take names from, with their submodules. Nothing else is ever imported for it.

    Args:
        modules: their names, as the configuration lists them.
        folders: where files of the user's are expected, to tell one that is hidden by an installed module of its name.

    Raises:
        ConfigurationError: a module is not there, or not the one that was meant.
        Exception: what a module raised when it was imported, with a note.
    """

    def __init__(self, modules: Sequence[str] = (), folders: Sequence[Path] = ()) -> None:
        self._modules = list(modules)
        self._folders = list(folders)
        for index, name in enumerate(self._modules):
            place = inside("imports", index)
            module = self._load(name, place)
            self._check_not_hidden(name, module, place)

    def _hint(self, text: str) -> str:
        """Return what may have been meant by a text that is no reference."""
        homes = [name for name in self._modules if text.isidentifier() and hasattr(sys.modules.get(name), text)]
        if homes and not text.startswith("_"):
            return f" (did you mean '{homes[0]}:{text}'?)"
        if text in self._modules:
            return f', such as "{text}:MyClass"'
        match = _DOTTED.fullmatch(text)
        return f" (did you mean '{match[1]}:{match[2]}'?)" if match else ', such as "my_module:MyClass"'

    def resolve(self, reference: str, place: str) -> Any:
        """Return what ``module:attribute`` names.

        Raises:
            ConfigurationError: not of that form, a module that is not listed, or an attribute that is not there.
        """
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise wrong(place, f"{reference!r} names nothing: write module:attribute{self._hint(reference)}")
        module_name, attributes = match.groups()
        if not any(module_name == listed or module_name.startswith(f"{listed}.") for listed in self._modules):
            wanted = ", ".join(f'"{name}"' for name in [*self._modules, module_name])
            there = importlib.util.find_spec(module_name.partition(".")[0]) is not None
            hint = "" if there else did_you_mean(module_name, self._modules)
            hint = hint or f"; add it there: imports = [{wanted}]"
            raise wrong(place, f"{reference!r} is in a module that is not listed under imports{hint}")
        return _descend(self._load(module_name, place), attributes, place)

    def _load(self, name: str, place: str) -> ModuleType:
        if name.endswith(".py") or "/" in name:
            meant = name.removesuffix(".py").strip("./").replace("/", ".")
            raise wrong(place, f"{name!r} is a file: give the module's name, {meant!r}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise wrong(place, f"{name!r} is not the name of a module, such as my_module or my_package.my_module")
        try:
            return importlib.import_module(name)
        except SyntaxError as error:
            raise wrong(place, f"{name!r} cannot be imported: {error.msg} ({error.filename}, line {error.lineno})") from None
        except SystemExit as end:
            raise wrong(
                place,
                f"{name!r} ended the program by sys.exit({end.code!r}) while it was imported: it is a script, not a module",
            ) from None
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                error.add_note(f"while importing {name!r} for {place}")
                raise
            beside = {path.stem for folder in self._folders for path in folder.glob("*.py")}
            where = f" in {' or '.join(str(folder) for folder in self._folders)}, nor" if self._folders else ""
            raise wrong(
                place, f"there is no module {error.name!r}{did_you_mean(error.name, beside)}{where} among the installed ones"
            ) from None
        except Exception as error:
            error.add_note(f"while importing {name!r} for {place}")
            raise

    def _check_not_hidden(self, name: str, module: ModuleType, place: str) -> None:
        origin = getattr(module, "__file__", None)
        for folder in self._folders:
            for file in (folder / f"{name.replace('.', '/')}.py", folder / name.replace(".", "/") / "__init__.py"):
                if file.is_file() and (origin is None or not file.samefile(origin)):
                    raise wrong(
                        place, f"{name!r} is {origin or 'a module of Python itself'}, which hides {file}; rename your file"
                    )


def _descend(module: ModuleType, attributes: str, place: str) -> Any:
    found: Any = module
    for name in attributes.split("."):
        if name.startswith("_"):
            raise wrong(place, f"{name!r} is private: a configuration can name public attributes only")
        if not isinstance(found, type) and found is not module:
            raise wrong(place, f"{name!r} cannot be looked up in a {type(found).__name__}, only in a module or class")
        try:
            found = getattr(found, name)
        except AttributeError:
            public = [one for one in dir(found) if not one.startswith("_")]
            raise wrong(place, f"{_name(found)} has no {name!r}{did_you_mean(name, public)}") from None
        if inspect.ismodule(found):
            raise wrong(place, f"{name!r} is a module: name what is in it, as {found.__name__}:attribute")
    return found


def _name(found: Any) -> str:
    return f"the module {found.__name__!r}" if inspect.ismodule(found) else f"the class {found.__qualname__!r}"


def find_files_in(*folders: Path) -> list[Path]:
    """Let modules be imported from ``folders``, after all that is installed; return them without doubles."""
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    sys.path.extend(str(folder) for folder in unique if str(folder) not in sys.path)
    importlib.invalidate_caches()
    return unique
