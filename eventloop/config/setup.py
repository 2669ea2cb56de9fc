"""A training loop from a configuration: model, data, optimizer, step, metrics, hooks, and the loop's own options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from eventloop.bus import Bus
from eventloop.config import (
    FromText,
    Imports,
    Maker,
    Options,
    check_keys,
    hook_from,
    hooks_in,
    inside,
    kind_of,
    merged,
    settle,
    wrong,
)
from eventloop.config.registry import did_you_mean
from eventloop.errors import ConfigurationError, SubscribeError
from eventloop.training.arguments import checked_seed, device_of
from eventloop.training.distributed.launch import is_parallel, own_device, shared
from eventloop.training.distributed.ranks import world_size
from eventloop.training.loop import TrainLoop
from eventloop.training.metrics import Metrics
from eventloop.training.rng import seed_everything

STAGES = ("train", "val", "test")
_STEPS = ("step", "val_step", "test_step")
_PARTS = (
    "imports",
    "model",
    "wrap",
    "optimizer",
    "data",
    *_STEPS,
    "metrics",
    "loop",
    "default_hooks",
    "custom_hooks",
)
_TYPED = ("loop", "default_hooks", "custom_hooks")
_NEEDED = {
    "model": 'what is trained, such as model = "my_module:network"',
    "optimizer": 'such as optimizer = { type = "torch.optim:AdamW", lr = 0.001 }',
    "data": 'with a train, such as data.train = "my_module:train_loader"',
    "step": 'the function of (model, batch) that returns the loss, such as step = "my_module:step"',
}
# What TrainLoop gets from the other parts.
_NOT_OF_LOOP = ("model", "optimizer", *(f"{stage}_data" for stage in STAGES), *_STEPS, "metrics", "bus", "config")


class Setup:
    """A configuration, checked, and made into a loop by :meth:`make`.

    ====================================  =====================================================================
    ``imports``                           modules that ``module:attribute`` may name; they are imported first
    ``model``, ``optimizer``              one, or a table of several by name
    ``wrap``                              under ``torchrun``: what the model is given to, such as a function that shards it;
                                          ``DistributedDataParallel`` by default, ``false`` for nothing
    ``data``                              ``train``, ``val``, ``test``
    ``step``, ``val_step``, ``test_step``  functions of ``(model, batch)``
    ``metrics``                           by name
    ``loop``                              all other arguments of :class:`TrainLoop`
    ``default_hooks``                     changes to the default hooks by name; see :func:`eventloop.config.merged`
    ``custom_hooks``                      a list of further hooks
    ====================================  =====================================================================

    Each is ``module:attribute``, which is called without arguments, or a table with it as ``type`` and its arguments
    beside it; functions with arguments have them filled in. The optimizer's ``params`` are the model's parameters. In a
    process group, each process gets its share of the data; see :func:`eventloop.training.distributed.launch.shared`.

    Args:
        config: what was read.
        default_hooks: by name, each a table with ``type``.
        folders: where files of the user's are; see :class:`eventloop.config.Imports`.

    Attributes:
        loop: the loop's own options, by name; may be changed before :meth:`make`.

    Raises:
        ConfigurationError: an unknown part, one that is missing, a module that is not there, a wrong option of the loop.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        default_hooks: Mapping[str, Mapping[str, Any]] | None = None,
        folders: Sequence[Path] = (),
    ) -> None:
        _check_parts(config, default_hooks or {})
        self._config = {name: value if name in _TYPED else _settled(value) for name, value in config.items()}
        for name, what in _NEEDED.items():
            if self._config.get(name) is None:
                raise wrong(name, f"is missing: {what}")
        self._defaults = default_hooks or {}
        self._maker = Maker(Imports(_names(self._config.get("imports", []), "imports"), folders))
        self.loop = self._loop_options()

    @property
    def tests(self) -> bool:
        """True if there is something to test on."""
        data = self._config["data"]
        return isinstance(data, Mapping) and data.get("test") is not None

    def make(self) -> TrainLoop:
        """Make everything in order, and the loop at last. Random numbers are seeded before, if ``loop.seed`` is given.

        Raises:
            ConfigurationError: with the place in the configuration, what was expected, and the nearest name.
            Exception: what a constructor raised, with a note that says for what.
        """
        if (seed := checked_seed(self.loop.get("seed"))) is not None:
            seed_everything(seed)  # the weights are drawn now, and not when the run begins
        if "device" in self.loop:
            self.loop["device"] = own_device(self.loop["device"])
        model = self._made_parallel(self._one_or_several("model", torch.nn.Module))
        optimizer = self._make_optimizer(model)
        data = self._data()
        metrics = _table(self._config.get("metrics") or {}, "metrics")
        steps = {name: self._step(name) for name in _STEPS if self._config.get(name) is not None}
        bus = Bus()
        self._add_hooks(bus, Maker(self._maker.imports, model=model, optimizer=optimizer))
        made = {
            name: self._maker.make(value, inside("metrics", str(name))) for name, value in metrics.items() if value is not None
        }
        try:
            Metrics(made)
        except ConfigurationError as error:
            raise wrong("metrics", str(error)) from error
        arguments: dict[str, Any] = {**data, **steps, **self.loop}
        try:
            return TrainLoop(model, optimizer, metrics=made, bus=bus, config=settle(dict(self._config)), **arguments)
        except ConfigurationError as error:
            raise wrong("loop", str(error)) from error

    def _loop_options(self) -> dict[str, Any]:
        options = Options(TrainLoop)
        for name in _NOT_OF_LOOP:
            options.known.pop(name)
        table = _table(self._config.get("loop", {}), "loop")
        options.label = "loop"
        return self._maker.decode(options, table, "loop", partly=True)[1]

    def _one_or_several(self, part: str, expected: type) -> Any:
        value = self._config[part]
        if not _is_several(value):
            return self._maker.make(value, part, expected=expected)
        return {name: self._maker.make(one, inside(part, name), expected=expected) for name, one in value.items()}

    def _made_parallel(self, model: Any) -> Any:
        if isinstance(model, Mapping):
            return {name: self._made_parallel(one) for name, one in model.items()}
        wrap = self._config.get("wrap")
        if isinstance(wrap, str | Mapping):
            self._maker.named(wrap, "wrap")  # a mistake shows in one process, too
        elif wrap is not None and wrap is not False:
            raise wrong("wrap", f"expected a function or class, as module:attribute, or false, got {kind_of(wrap)}")
        if wrap is False or world_size() == 1 or is_parallel(model):
            return model
        if (device := self.loop.get("device")) is not None:
            model.to(device_of(device, {}))  # where it trains, before its parameters are known to anybody else
        if wrap is None:
            return DistributedDataParallel(model)
        wrapped = self._maker.make(wrap, "wrap", given={"module": model, "model": model})
        if not isinstance(wrapped, torch.nn.Module | None):
            raise wrong("wrap", f"expected a Module, or a function that changes the one it gets, got {wrapped!r}")
        return model if wrapped is None else wrapped

    def _make_optimizer(self, model: Any) -> Any:
        value = self._config["optimizer"]
        if not _is_several(value):
            return self._optimizer(value, "optimizer", model)
        # Of models and optimizers by name, those of one name belong together.
        theirs = model if isinstance(model, Mapping) else {}
        return {name: self._optimizer(one, inside("optimizer", name), theirs.get(name, model)) for name, one in value.items()}

    def _optimizer(self, value: Any, place: str, model: Any) -> Any:
        models = list(model.values()) if isinstance(model, Mapping) else [model]
        given = {"model": model, "params": [parameter for one in models for parameter in one.parameters()]}
        return self._maker.make(value, place, expected=torch.optim.Optimizer, given=given)

    def _data(self) -> dict[str, Any]:
        table = _table(self._config["data"], "data")
        check_keys(table, STAGES, "data", "data")
        if table.get("train") is None:
            raise wrong("data.train", 'is missing: what to train on, such as data.train = "my_module:train_loader"')
        made: dict[str, Any] = {}
        for stage, value in table.items():
            if value is not None:
                made[f"{stage}_data"] = batches = self._maker.make(value, inside("data", stage))
                _check_batches(batches, inside("data", stage))
                made[f"{stage}_data"] = shared(batches, inside("data", stage), seed=self.loop.get("seed") or 0)
        return made

    def _step(self, name: str) -> Callable[..., Any]:
        step = self._maker.function(self._config[name], name)
        if isinstance(step, type):
            raise wrong(
                name, f"{step.__name__} is a class: name a function, or write a table with it as type for an object of it"
            )
        return step

    def _add_hooks(self, bus: Bus, maker: Maker) -> None:
        tables = merged(self._defaults, self._config.get("default_hooks") or {}, "default_hooks")
        defaults = {name: hook_from(entry, maker, inside("default_hooks", name)) for name, entry in tables.items()}
        customs = hooks_in(_parsed(self._config.get("custom_hooks") or []), maker, "custom_hooks")
        try:
            bus.add_chosen([*defaults.values(), *customs])
        except SubscribeError as error:
            kinds = {type(hook) for hook, _ in customs}
            twice = [f"default_hooks.{name}" for name, (hook, _) in defaults.items() if type(hook) in kinds]
            if not twice:
                raise
            raise wrong("custom_hooks", f"{error}; or change {', '.join(twice)}, which is there already, instead") from error


def _check_parts(config: Mapping[str, Any], default_hooks: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a key that is no part; it may be an option of one."""
    inner = [f"loop.{name}" for name in Options(TrainLoop).known if name not in _NOT_OF_LOOP]
    inner += [f"default_hooks.{name}" for name in default_hooks]
    for key in map(str, config):
        if key not in _PARTS and not did_you_mean(key, _PARTS) and (hint := did_you_mean(key, inner)):
            raise wrong(inside("", key), f"a configuration has no option {key!r}{hint}")
    check_keys(config, _PARTS, "", "a configuration")


def _settled(value: Any) -> Any:
    """Return a part with what was typed in place of an object parsed: null takes one away. Its options have types."""
    if isinstance(value, Mapping) and "type" not in value:
        return {name: _parsed(one) for name, one in value.items()}
    return _parsed(value)


def _parsed(value: Any) -> Any:
    """Return what was typed on the command line in place of a whole table or list as one."""
    return settle(value) if isinstance(value, FromText) else value


def _check_batches(batches: Any, place: str) -> None:
    if not hasattr(batches, "__iter__"):
        hint = '; a dataset goes into a loader: { type = "torch.utils.data:DataLoader", dataset = … }'
        is_dataset = hasattr(batches, "__getitem__")
        raise wrong(place, f"expected an iterable of batches, such as a DataLoader, got {batches!r}{hint * is_dataset}")


def _is_several(value: Any) -> bool:
    return isinstance(value, Mapping) and "type" not in value and all(isinstance(one, Mapping | str) for one in value.values())


def _table(value: Any, place: str) -> Mapping[str, Any]:
    found = _parsed(value)
    if not isinstance(found, Mapping):
        raise wrong(place, f"expected a table, got {kind_of(found)}")
    return found


def _names(value: Any, place: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise wrong(place, f'expected a list of modules, such as ["my_module"], got {value!r}')
    return value
