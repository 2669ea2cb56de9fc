"""The public names of ``eventloop``, the mount points and the hooks, loaded on first use.

``python -m trainbus`` runs the command ``trainbus``; ``torchrun -m trainbus run`` does so in several processes.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventloop import *  # noqa: F403
    from eventloop.bridges.ignite.saver import TrainbusSaver as TrainbusSaver
    from eventloop.events import *  # noqa: F403
    from eventloop.events.mount_points import *  # noqa: F403
    from hooks import *  # noqa: F403

    __version__: str

_PACKAGES = ("eventloop", "hooks")
_OPTIONAL = {"TrainbusSaver": ("eventloop.bridges.ignite.saver", "ignite")}
"""Names that need another library: their modules, and the library. ``from trainbus import *`` leaves them out."""
_PUBLIC = ("eventloop", "eventloop.events", "hooks")
_HOME = Path(__file__).resolve().parent


def main() -> int:
    """Run the command line; return its exit status.

    The command and its child processes import trainbus's packages before a user's ``hooks.py`` or ``eventloop.py``.
    """
    if not all(_is_own(find_spec(name)) for name in _PACKAGES):
        sys.path.insert(0, str(_HOME))
    elif str(_HOME) not in sys.path:  # an editable install: before the user's folders, which are appended
        sys.path.append(str(_HOME))
    try:
        from eventloop.cli import main as command
    except KeyboardInterrupt:  # while torch was being imported
        return 130
    return command()


def _is_own(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).resolve().parent == _HOME.joinpath(*spec.name.split("."))


def _own(name: str) -> ModuleType:
    """Import one of trainbus's packages; raise ImportError if another module has its name."""
    module = importlib.import_module(name)
    if not _is_own(module.__spec__):
        raise ImportError(
            f"{name!r} is {module.__file__ or list(module.__path__)}, which hides trainbus's package {name!r}; rename it",
            name=name,
        )
    return module


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        return globals().setdefault(name, _find(name))

    def __dir__() -> list[str]:
        there = [name for name, (_, library) in _OPTIONAL.items() if find_spec(library)]  # help() loads each name
        return sorted(["__version__", *there, *_public()])


def _find(name: str) -> Any:
    if name == "__version__":
        try:
            return metadata.version("trainbus")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            return "0+unknown"
    if name == "__all__":
        return _public()
    if name in _PACKAGES:
        return _own(name)
    if name in _OPTIONAL:
        _own("eventloop")
        return getattr(importlib.import_module(_OPTIONAL[name][0]), name)
    if not name.startswith("_"):
        for package in map(_own, _PUBLIC):
            if name in package.__all__:
                return getattr(package, name)
    hint = "" if name.startswith("_") else importlib.import_module("eventloop.spelling").did_you_mean(name, _public())
    raise AttributeError(f"module 'trainbus' has no attribute {name!r}{hint}")


def _public() -> list[str]:
    return list(dict.fromkeys(name for package in map(_own, _PUBLIC) for name in package.__all__))


if __name__ == "__main__":
    sys.exit(main())
