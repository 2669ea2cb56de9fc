"""Definitions in a notebook: a cell that is executed again defines its functions and hook classes anew.

The new definition replaces what the old one has subscribed, as it replaces the name in the notebook. A definition is known by
its code. The functions of one ``def`` in a loop share their code, and all stay; so do two definitions at different lines of a
cell or file. A script executes no definition twice, so nothing is replaced there. Of a class whose body has no function, only
the name is known, which counts in a notebook or at a prompt.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable
from types import CodeType
from typing import Any, Final, NamedTuple

from trainbus.eventloop.bus.guests import GuestHook
from trainbus.eventloop.bus.handler import unwrapped
from trainbus.eventloop.bus.hook import Hook
from trainbus.eventloop.seams import Seam

PROMPTS: Final = Seam(("<stdin>", "<console>"))  # each input has this file name, and begins at line 1


def redefines(new: Any, old: Any) -> bool:
    """Return True if a function, or a hook with its label, is from a later definition of what ``old`` is from."""
    if isinstance(new, Hook) and isinstance(old, Hook):
        if new.label != old.label:
            return False
        new, old = _class_of(new), _class_of(old)
    else:
        new, old = (one if hasattr(one, "__qualname__") else type(one) for one in (unwrapped(new), unwrapped(old)))
    names = {(getattr(one, "__module__", ""), getattr(one, "__qualname__", "")) for one in (new, old)}
    module, name = names.pop()
    if names or module != "__main__" or name == "_":
        return False
    later, earlier = _code_of(new), _code_of(old)
    if later is None or earlier is None:
        return new is not old and (hasattr(builtins, "get_ipython") or hasattr(sys, "ps1"))
    if later is earlier:
        return False
    elsewhere = later.co_filename != earlier.co_filename
    if later.co_name == "<lambda>":
        return later == earlier and not elsewhere  # the same cell again
    return elsewhere or later.co_firstlineno == earlier.co_firstlineno or later.co_filename in PROMPTS.value


def redefined_hooks(new: Iterable[Hook], old: Iterable[Hook]) -> list[Hook]:
    """Return the hooks among ``old`` that hooks of ``new`` define anew."""
    kinds = {(hook.label, _class_of(hook)): hook for hook in new if _class_of(hook).__module__ == "__main__"}
    by_label: dict[str, list[Hook]] = {}
    for (label, _), hook in kinds.items():
        by_label.setdefault(label, []).append(hook)
    return [one for one in old if any(redefines(hook, one) for hook in by_label.get(one.label, ()))] if kinds else []


class Definition(NamedTuple):
    """What a later definition would replace. Functions of one ``def`` share it, and :func:`redefines` says the same of all."""

    name: Any
    code: Any


def definition_of(handler: Any) -> Definition | None:
    """Return the definition of a function, or of the class of another handler; None if nothing replaces it."""
    defined = unwrapped(handler)
    defined = defined if hasattr(defined, "__qualname__") else type(defined)
    if getattr(defined, "__module__", "") != "__main__" or defined.__qualname__ == "_":
        return None
    code = _code_of(defined)
    # Lambdas have one name, and are compared by their code.
    name = defined.__qualname__ if code is None or code.co_name != "<lambda>" else (defined.__qualname__, code)
    return Definition(name, code or defined)


def _class_of(hook: Hook) -> type:
    return type(hook.guest) if isinstance(hook, GuestHook) else type(hook)


def _code_of(defined: Any) -> CodeType | None:
    """Return the code of a function, or of the first function in the body of a class."""
    if not isinstance(defined, type):
        return getattr(defined, "__code__", None)
    codes = (getattr(one, "__code__", None) for one in vars(defined).values())
    body = f"{defined.__qualname__}."  # not of functions from elsewhere, nor of those that a dataclass gets
    return next((code for code in codes if isinstance(code, CodeType) and code.co_qualname.startswith(body)), None)
