"""The names that wrappers of modules put into the keys of a ``state_dict``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from trainbus.eventloop.privates import inner_of, parts_of

_NAMES: Final = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Map names to themselves without ``module.`` and ``_orig_mod.`` wherever they are, also those of a user's own modules.

    For files whose model is not here; :class:`WrapperNames` knows which of them are a wrapper's.
    """
    return {name: _NAMES.sub("", name) for name in names}


def unwrapped(model: Any) -> Any:
    """Return the module inside the wrappers around it, however many there are; by the names of their classes."""
    inner = inner_of(type(model))
    return unwrapped(getattr(model, inner)) if inner is not None else model


class WrapperNames:
    """The keys of a model's ``state_dict``, with and without the names of wrappers around the model or parts of it.

    Only names that a wrapper has put there are taken out: DDP's ``module.``, not that of ``Residual(module=...)``. A wrapper
    that leaves its own name out of the ``state_dict`` (FSDP, activation checkpointing) is recognised.

    Args:
        model: the model.
        names: the keys of its ``state_dict()``.
    """

    def __init__(self, model: torch.nn.Module, names: Iterable[str]) -> None:
        self._model = model
        # By the name of a module in the model: its name in checkpoints, and the module; None below what is not a module.
        self._modules: dict[str, tuple[str, Any]] = {}
        self.wrapped = any(inner_of(type(one)) is not None for one in model.modules())
        self.short = {name: self.without(name) for name in names}
        """The keys in checkpoints by the names in the ``state_dict``."""
        if len(set(self.short.values())) < len(self.short):  # a wrapper with tensors of its own
            self.short, self.wrapped = {name: name for name in self.short}, False
        self.long = {short: name for name, short in self.short.items()}
        """The names in the ``state_dict`` by the keys in checkpoints."""
        self._prefixes: dict[str, str] = {}
        for prefix, (short, _) in self._modules.items():
            self._prefixes[short] = max(self._prefixes.get(short, ""), prefix, key=len)

    def without(self, name: str) -> str:
        """Return a name in the model without those of wrappers."""
        if not self.wrapped:
            return name
        prefix, dot, leaf = name.rpartition(".")
        return _join(self._module(prefix)[0], leaf) if dot else name

    def within(self, key: str) -> str:
        """Return the name in the ``state_dict`` of a key in checkpoints, also of one that the model lacks."""
        if key in self.long or not self.wrapped:
            return self.long.get(key, key)
        prefix, rest = key, ""
        while prefix not in self._prefixes and prefix:
            prefix, _, part = prefix.rpartition(".")
            rest = _join(part, rest)
        return _join(self._prefixes.get(prefix, ""), rest)

    def metadata_without(self, metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the versions by the names of modules in checkpoints; of a wrapper and its module, the module's."""
        if metadata is None or not self.wrapped:
            return metadata
        return {self._module(name)[0]: one for name, one in metadata.items()}

    def metadata_within(self, metadata: Mapping[str, Any] | None, own: Iterable[str]) -> Mapping[str, Any] | None:
        """Return the versions in a checkpoint by the names of modules here, of which those in ``own`` have a version."""
        if metadata is None or not self.wrapped:
            return metadata
        known = {name: metadata[short] for name in own if (short := self._module(name)[0]) in metadata}
        return {self.within(name): one for name, one in metadata.items()} | known

    def _module(self, name: str) -> tuple[str, Any]:
        if name not in self._modules:
            self._modules[name] = self._look_up(name)
        return self._modules[name]

    def _look_up(self, name: str) -> tuple[str, Any]:
        if not name:
            return "", self._model
        above, _, part = name.rpartition(".")
        short, module = self._module(above)
        inner = None
        while module is not None and (inner := inner_of(type(module))) not in (None, part):
            module = parts_of(module)[2].get(str(inner))  # the wrapper has left its own name out
        if module is None:
            return _join(short, part), None
        return (short if part == inner else _join(short, part)), parts_of(module)[2].get(part)


def same_but_for_wrappers(saved: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Map saved keys that a model lacks to its own keys that differ from them by wrappers' names only.

    trainbus 0.1 and 0.2 took ``module.`` out also where it was a user's own. Other programs save it as a wrapper's.
    """
    saved, own = {*saved}, {*own}
    extra, lacking = without_wrappers(saved - own), without_wrappers(own - saved)
    theirs, ours = Counter(extra.values()), Counter(lacking.values())
    wanted = {short: name for name, short in lacking.items() if ours[short] == theirs[short] == 1}
    return {name: wanted[short] for name, short in extra.items() if short in wanted}


def _join(one: str, other: str) -> str:
    return f"{one}.{other}" if one and other else one or other
