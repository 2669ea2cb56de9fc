"""``run.keep()``: values of the user's loop that checkpoints hold, such as the best score, a replay buffer or environments.

What is kept is one object in ``run.stateful``, so that a resumed run gets it back where it gets the others back.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from logging import Logger
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import SPACE_GENERATOR
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.training.copies import is_flat
from trainbus.eventloop.training.rng import is_generator, set_rng_state, set_state_of, state_of

log = get_logger()

KEPT: Final = "kept"
"""Name of the kept values in ``run.stateful``."""
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray, np.generic)
_CONSTANT: Final = ("metadata", "spec", "cached_spec", "saved_kwargs")
"""Attributes of an environment that its maker sets once, with an underscore or without."""
_DEEPEST: Final = 4
"""Objects in objects of an environment."""
_NUMBERS: Final = "biufc"
"""Kinds of NumPy's types that checkpoints hold."""
_Taken = dict[Hashable, tuple[Any, Any, Any]]
"""By place in memory: each value that was restored, its saved state, and what it has become."""
_KINDS: Final = (
    "plain values, tensors, arrays, lists and dicts of them, generators of random numbers, environments with reset() and "
    "step(), and objects with state_dict() and load_state_dict()"
)


class KeptValues:
    """Values that a loop keeps, as attributes: what an attribute is at a save comes back in a resumed run.

    Mutable values, objects and generators come back in place, so that other names of them see the saved state, too. Numbers and
    texts come back as the attribute: read and set ``kept.best``, not a variable of your own.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any]
        self._saved: Mapping[str, Any] | None
        self._rng: Any
        self._taken: _Taken
        vars(self).update(_values={}, _saved=None, _rng=None, _taken={}, _used=set())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"there is no {name}" if name.startswith("_") else self._unknown(name), name=name, obj=self)
        self._used.add(name)
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(self._unknown(name), name=name, obj=self)
        self._used.add(name)
        self._values[name] = value

    def __dir__(self) -> list[str]:
        return [*self._values]

    def __repr__(self) -> str:
        return f"KeptValues({', '.join(self._values)})"

    def _unknown(self, name: str) -> str:
        return f"nothing is kept as {name!r}{did_you_mean(name, self._values)}; begin with run.keep({name}=...)"

    def resume(self, saved: Mapping[str, Any] | None, rng: Any) -> None:
        """Give the values that are kept later their states in a checkpoint; None if it has none.

        ``rng`` has its random states: what is kept may be drawn before it is kept.
        """
        vars(self).update(_saved={} if saved is None else saved, _rng=rng)

    def add(self, values: Mapping[str, Any]) -> None:
        """Keep values; in a resumed run they get their saved states."""
        for name, value in values.items():
            if name in self._values:
                raise ConfigurationError(f"run.keep({name}=...): something is kept as {name!r} already; give another name")
            _state(value, name)  # checks it
        for name, value in values.items():
            self._values[name] = value
            _tell_of_lost(name, value)
            if self._saved is None:
                continue
            if name in self._saved:
                self._values[name] = _restored(value, self._saved[name], self._taken)
            else:
                log.warning(
                    "the checkpoint has no value that was kept under this name; it stays as it is given",
                    id="kept-value-missing",
                    name=name,
                )

    def of_process(self, names: Iterable[str]) -> list[str]:
        """Return the names of generators and environments, which differ between processes."""
        values = [(name, value) for name in names for value in _items(self._values[name])]
        return [*dict.fromkeys(name for name, value in values if is_generator(value) or _is_environment(value))]

    def begin_training(self) -> None:
        """Restore the random states of the checkpoint. Warn of values in it that are not kept in this program."""
        if self._rng is not None:
            set_rng_state(self._rng)
        if self._saved and (left := [name for name in self._saved if name not in self._values]):
            log.warning(
                "the checkpoint has kept values that this program does not keep; they are lost",
                id="kept-values-lost",
                names=left,
            )
        vars(self).update(_saved=None, _rng=None, _taken={})

    def tell_unused(self) -> None:
        """Warn of values that come back as attributes, which the loop has not used."""
        if unused := [name for name, value in self._values.items() if name not in self._used and _is_replaced(value)]:
            log.warning(
                "these kept values were never read or set, so checkpoints hold what they began with; write `kept = "
                "run.keep(...)`, and use kept.NAME instead of a variable",
                id="kept-values-unused",
                names=unused,
            )

    def state_of(self, name: str) -> Any:
        """Return the state of one value."""
        return _state(self._values[name], name)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all values."""
        return {name: _state(value, name) for name, value in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the values their states, as far as ``state`` has them."""
        taken: _Taken = {}
        for name in self._values:
            if name in state:
                self._values[name] = _restored(self._values[name], state[name], taken)


def _items(value: Any) -> Iterable[Any]:
    """Return the values in a container, or the one that is none."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else [value]


def _is_replaced(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_replaced, value))
    return isinstance(value, bool | int | float | str | bytes | None)


# --------------------------------------------------------------------------------------------------------------- states


def _takes_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_environment(value: Any) -> bool:
    """Return True for environments, their wrappers and vectors."""
    return all(hasattr(value, name) for name in ("reset", "step", "action_space"))


def _is_object(value: Any) -> bool:
    return _takes_state(value) or is_generator(value) or _is_environment(value)


def _state(value: Any, path: str) -> Any:
    """Return the state of a value, by reference, as a tree for a checkpoint."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in _NUMBERS:
        if value.dtype.kind in "SU":
            return value.tolist()
        raise ConfigurationError(f"run.keep() cannot keep {path}, an array of {value.dtype}: it takes {_KINDS}")
    if isinstance(value, _PLAIN):
        return value
    if _takes_state(value):
        return value.state_dict()
    if is_generator(value):
        return state_of(value)
    if _is_environment(value):
        return _Environment(value, path).state()
    if isinstance(value, dict):
        if is_flat(value.values()):
            return dict(value)
        return {key: _state(one, f"{path}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple | deque | set | frozenset) and not hasattr(value, "_fields"):
        flat = is_flat(value)  # 100,000 numbers take 3 ms, and one by one 40
        states = [*value] if flat else [_state(one, f"{path}[{index}]") for index, one in enumerate(value)]
        return tuple(states) if isinstance(value, tuple) else states
    raise ConfigurationError(f"run.keep() cannot keep {path}, a {type(value).__name__}: it takes {_KINDS}")


def _restored(live: Any, saved: Any, taken: _Taken) -> Any:
    """Return a value with its saved state, in place where it can be changed.

    A value at several places of this program may be several values in the saved run: the first gets it, the others are new.
    """
    if not isinstance(live, torch.Tensor | np.ndarray | dict | list | deque | set) or _is_object(live):
        return _with_state(live, saved, taken)
    place = _place(live)
    if place in taken:
        _, other, value = taken[place]
        return value if _equal(other, saved) else _own(saved)
    value = _with_state(live, saved, taken)
    taken[place] = live, saved, value
    return value


def _with_state(live: Any, saved: Any, taken: _Taken) -> Any:
    if _takes_state(live):
        live.load_state_dict(saved)
    elif is_generator(live):
        set_state_of(live, saved)
    elif _is_environment(live):
        _Environment(live, "").load(saved, taken)
    elif isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return _into_tensor(live, saved)
    elif isinstance(live, np.ndarray) and isinstance(saved, np.ndarray):
        if (live.shape, live.dtype, live.flags.writeable) != (saved.shape, saved.dtype, True):
            return saved.copy()
        live[...] = saved
    elif isinstance(live, np.ndarray) and isinstance(saved, list):  # texts
        return np.asarray(saved, dtype=live.dtype)
    elif isinstance(live, dict) and isinstance(saved, dict):
        new = {key: _restored(live[key], one, taken) if key in live else _own(one) for key, one in saved.items()}
        live.clear()
        live.update(new)
    elif isinstance(live, list | deque) and isinstance(saved, list):
        items = _each(live, saved, taken)
        live.clear()
        live.extend(items)
    elif isinstance(live, set) and isinstance(saved, list):
        live.clear()
        live.update(saved)
    elif isinstance(live, frozenset) and isinstance(saved, list):
        return frozenset(saved)
    elif isinstance(live, tuple) and isinstance(saved, tuple):
        return tuple(_each(live, saved, taken))
    else:
        return _own(saved)
    return live


def _each(live: Any, saved: Any, taken: _Taken) -> list[Any]:
    """Return the saved values of a sequence, in place if it has as many."""
    if is_flat(saved) and is_flat(live):
        return [*saved]
    if len(live) != len(saved):
        return [*map(_own, saved)]
    return [_restored(one, other, taken) for one, other in zip(live, saved, strict=True)]


def _place(live: Any) -> Hashable:
    """Return what tells a value apart from others; views of the same numbers are one."""
    if isinstance(live, np.ndarray):
        return live.ctypes.data, live.shape, live.strides, live.dtype.str
    if _is_strided(live):
        return live.data_ptr(), live.shape, live.stride(), live.dtype
    return id(live)


def _is_strided(live: Any) -> bool:
    return type(live) in (torch.Tensor, torch.nn.Parameter) and live.layout is torch.strided and live.device.type != "meta"


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _into_tensor(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    shared = _is_strided(live) and any(step == 0 and size > 1 for step, size in zip(live.stride(), live.shape, strict=True))
    # Sparse rows and columns (CSR, CSC and others) take only as many entries as they have.
    fixed = live.layout not in (torch.strided, torch.sparse_coo) or live.layout is not saved.layout
    if live.shape != saved.shape or live.dtype != saved.dtype or live.is_inference() or shared or fixed:
        return saved.to(live.device, copy=True)
    with torch.no_grad():
        live.copy_(saved)
    return live


def _own(saved: Any) -> Any:
    """Copy what is in a checkpoint's tree, because a training changes it."""
    if isinstance(saved, dict):
        return {key: _own(one) for key, one in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(saved if is_flat(saved) else map(_own, saved))
    if isinstance(saved, torch.Tensor):
        return saved.detach().clone()
    return saved.copy() if isinstance(saved, np.ndarray) else saved


# --------------------------------------------------------------------------------------------------------- environments


class _Environment:
    """An environment: the attributes of its wrappers and of itself that are values, and their generators."""

    def __init__(self, environment: Any, path: str) -> None:
        self._environment = environment
        self._path = path
        self.lost: list[str] = []
        """Attributes that are neither values nor known to be no state, once the state was asked for."""

    def state(self) -> dict[str, Any]:
        """Return the attributes by the place of their owner: ``""``, ``".env"``, ``".envs[0].env"``."""
        found: dict[str, dict[str, Any]] = {}
        for place, owner in _owners(self._environment):
            if hasattr(owner, "processes"):
                raise ConfigurationError(
                    f"run.keep({self._path}=...): {type(owner).__name__} has its environments in other processes, whose state "
                    "cannot be saved; use SyncVectorEnv"
                )
            values = found[place] = {}
            for name, value in vars(owner).items():
                if name.removeprefix("_") in _CONSTANT:
                    continue
                try:
                    values[name] = _attribute_state(value)
                except ConfigurationError:
                    if not _is_part(value):
                        self.lost.append(f"{type(owner).__name__}.{name}")
        return found

    def load(self, state: Mapping[str, Any], taken: _Taken) -> None:
        """Restore the attributes; others stay."""
        for place, owner in _owners(self._environment):
            own = vars(owner)
            for name, saved in state.get(place, {}).items():
                live = own.get(name)
                if live is None and name == SPACE_GENERATOR and saved is not None:
                    set_state_of(owner.np_random, saved)  # makes it
                elif _is_space(live) or not _is_part(live):
                    own[name] = _load_attribute(live, saved, taken)


def _tell_of_lost(name: str, value: Any) -> None:
    """Warn of attributes of environments that checkpoints do not hold."""
    lost: list[str] = []
    for one in _items(value):
        if _is_environment(one) and not _takes_state(one):
            environment = _Environment(one, name)
            environment.state()
            lost += environment.lost
    if lost:
        log.warning(
            "these attributes of an environment are no values, so checkpoints do not hold them; if they change in an episode, "
            "give the environment state_dict() and load_state_dict()",
            id="attributes-not-kept",
            kept=name,
            attributes=[*dict.fromkeys(lost)][:8],
        )


def _owners(environment: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield an environment, those that it wraps, and those of a vector, each with its place."""
    yield place, environment
    own = vars(environment)
    if _is_environment(own.get("env")):
        yield from _owners(own["env"], f"{place}.env")
    for index, one in enumerate(own["envs"] if isinstance(own.get("envs"), list | tuple) else ()):
        yield from _owners(one, f"{place}.envs[{index}]")


def _is_space(value: Any) -> bool:
    return hasattr(value, "sample") and hasattr(value, "contains") and hasattr(value, SPACE_GENERATOR)


def _is_part(value: Any) -> bool:
    """Return True for an attribute of an environment that is no state: spaces, wrapped environments, functions and the like."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_part, value))
    if isinstance(value, type | ModuleType | enum.Enum | Logger) or callable(value) or hasattr(value, "entry_point"):
        return True
    return _is_environment(value) or _is_space(value)


def _has_attributes(value: Any) -> bool:
    """Return True for an object inside an environment, such as running means, that its attributes can describe."""
    return hasattr(value, "__dict__") and not (_is_part(value) or _is_object(value) or isinstance(value, _PLAIN))


def _attribute_state(value: Any, depth: int = 0) -> Any:
    if _is_space(value):
        return _space_state(value)
    if _is_part(value):
        raise ConfigurationError("no state")
    try:
        return _state(value, "")
    except ConfigurationError:
        if depth == _DEEPEST or not _has_attributes(value):
            raise
    inner = {name: one for name, one in vars(value).items() if not _is_part(one)}
    return {name: _attribute_state(one, depth + 1) for name, one in inner.items()}


def _load_attribute(live: Any, saved: Any, taken: _Taken) -> Any:
    if _is_space(live):
        _load_space(live, saved)
    elif isinstance(saved, dict) and not isinstance(live, dict) and _has_attributes(live):
        own = vars(live)
        own.update({name: _load_attribute(own.get(name), one, taken) for name, one in saved.items()})
    else:
        return _restored(live, saved, taken)
    return live


def _space_state(space: Any) -> dict[str, Any]:
    generator = getattr(space, SPACE_GENERATOR)
    spaces = getattr(space, "spaces", {})
    inner = dict(spaces if isinstance(spaces, Mapping) else enumerate(spaces))
    return {
        "generator": None if generator is None else state_of(generator),
        "spaces": {str(name): _space_state(one) for name, one in inner.items() if _is_space(one)},
    }


def _load_space(space: Any, saved: Mapping[str, Any]) -> None:
    if saved["generator"] is not None:
        set_state_of(space.np_random, saved["generator"])
    spaces = getattr(space, "spaces", {})
    for name, one in dict(spaces if isinstance(spaces, Mapping) else enumerate(spaces)).items():
        if str(name) in saved["spaces"]:
            _load_space(one, saved["spaces"][str(name)])
