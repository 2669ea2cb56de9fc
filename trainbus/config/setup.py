"""Create hooks, and a whole training loop (model, data, optimizer, step, metrics), from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainbus.config.make import Maker, derived
from trainbus.config.names import Imports, checked_system, priority_scales
from trainbus.config.read import all_parsed, check_keys, inside, kind_of, parsed, wrong
from trainbus.eventloop.annotations import Signature
from trainbus.eventloop.builtin import load_builtin
from trainbus.eventloop.bus import Bus
from trainbus.eventloop.bus.guests import as_hook, guest_kind
from trainbus.eventloop.bus.hook import Hook
from trainbus.eventloop.bus.priority import Priority, PriorityLike
from trainbus.eventloop.errors import ConfigurationError, SubscribeError
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.training.arguments import device_of
from trainbus.eventloop.training.distributed.launch import own_device, shared
from trainbus.eventloop.training.distributed.ranks import is_parallel
from trainbus.eventloop.training.loop import TrainLoop
from trainbus.eventloop.training.rng import checked_seed, seed_everything
from trainbus.eventloop.world import world_size

Tables = Mapping[str, Mapping[str, Any]]
Chosen = tuple[Hook, PriorityLike | None]  # a hook and its priority from the configuration; None keeps the hook's own priority


def add_hooks(
    bus: Bus,
    hooks: Iterable[Any],
    *,
    imports: Sequence[str] = (),
    model: Any = None,
    optimizer: Any = None,
    system: str = "",
) -> None:
    """Add the hooks of a configuration to a bus: all of them, or none if one is invalid.

        add_hooks(bus, [{"type": "EMAHook", "momentum": 0.001}, {"type": "LoggerHook", "priority": "LOW"}])

    Args:
        bus: the bus.
        hooks: names, or tables with ``type`` (a registered name, a class, or ``module:attribute``), options of the
            constructor, and optionally ``priority`` and ``name``. A table also describes an option that is an object.
            MMEngine's ``default_hooks``, a mapping of such tables, is accepted as it is; entries that are None are left out.
        imports: modules that ``module:attribute`` may name.
        model: value of a required parameter ``model`` that a table lacks.
        optimizer: the same for ``optimizer``, such as a scheduler's; a mapping if there are several.
        system: ``"MMEngine"`` if the list is of a configuration of MMEngine: its names then have MMEngine's defaults, such as
            ``min_delta=0.1``. Without it, a name has the defaults of trainbus's class.

    Raises:
        ConfigurationError: an entry is invalid; the message has its position (``hooks[2].interval``) and the nearest name. Or
            the ``system`` is unknown.
        SubscribeError: as for :meth:`Bus.add`.
    """
    load_builtin("compat")  # registers the systems
    maker = Maker(Imports(imports), checked_system(system), model=model, optimizer=optimizer)
    bus.internal.add_chosen(hooks_in(hooks, maker, "hooks"))


def hooks_in(entries: Any, maker: Maker, where: str) -> list[Chosen]:
    """Return the hooks of a list of tables, names or hook objects; see :func:`add_hooks`."""
    if isinstance(entries, Mapping) and all(one is None or isinstance(one, Mapping | Hook) for one in entries.values()):
        given = {name: one for name, one in entries.items() if one is not None}  # MMEngine's default_hooks; None is off
        return [hook_from(entry, maker, inside(where, name)) for name, entry in given.items()]
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise wrong(where, f"expected a list of hooks, got {kind_of(entries)}")
    return [hook_from(entry, maker, inside(where, index)) for index, entry in enumerate(entries)]


def hook_from(entry: Any, maker: Maker, where: str) -> Chosen:
    """Return the hook that a table, a name or a class describes, or the hook that is given."""
    if isinstance(entry, Hook) or guest_kind(type(entry)) is not None:
        return as_hook(entry), None
    table = {"type": entry} if isinstance(entry, str | type) else entry
    if not isinstance(table, Mapping):
        raise wrong(where, f"expected a table with the type of a hook, or its name, got {kind_of(entry)}")
    found, options = maker.find(table, where, Hook)
    is_guest = isinstance(found, type) and guest_kind(found) is not None
    cls: type = found if is_guest else derived(found, Hook, inside(where, "type"))
    ours = ("type", "priority", *priority_scales, "name")
    options = {key: value for key, value in (options or {}).items() if key not in ours[:-1]}
    signature, priority = Signature(cls, also=ours), _priority(table, where)
    name = None if "name" in signature.options else options.pop("name", None)
    made = maker.call(signature, options, where)
    try:
        hook = as_hook(made)
    except SubscribeError as error:
        raise wrong(inside(where, "type"), str(error)) from None
    if name is not None:
        hook.name = maker.typed(name, str, inside(where, "name"))
    return hook, priority


def merged(defaults: Tables, changes: Any, where: str) -> dict[str, Any]:
    """Return ``defaults`` with the changes of a configuration, by name.

    A table without ``type`` changes options, a table with ``type`` replaces the hook, and ``false`` (or null) removes it. A new
    name with a ``type`` adds a hook.
    """
    if not isinstance(changes, Mapping):
        raise wrong(where, f"expected a table of hooks by name, got {kind_of(changes)}")
    hooks: dict[str, Any] = {name: dict(table) for name, table in defaults.items()}
    for name, value in changes.items():
        here = inside(where, str(name))
        is_off = value is False or value is None
        is_change = isinstance(value, Mapping) and "type" not in value
        if name not in defaults and (is_off or is_change):
            hint = did_you_mean(str(name), defaults) or f", which are {', '.join(defaults)}"
            raise wrong(here, f"{name!r} is not one of the default hooks{hint}; to add another hook, give its type")
        if is_off:
            del hooks[name]
        elif is_change:
            hooks[name] |= value
        elif isinstance(value, str | type | Hook | Mapping) or guest_kind(type(value)) is not None:
            hooks[name] = value
        else:
            raise wrong(here, f"expected a table of options, or false to remove it, got {kind_of(value)}")
    return hooks


def _priority(table: Mapping[str, Any], where: str) -> int | None:
    key, names = "priority", None
    for theirs, scale in priority_scales.items():
        if table.get(theirs) is not None:
            key, names = theirs, scale.names
            if "priority" in table:
                advice = f"{key} is {scale.system}'s name for it, on {scale.system}'s scale"
                raise wrong(inside(where, key), f"priority is given, too; give one of them: {advice}")
    value = all_parsed(table.get(key))
    if isinstance(value, Enum) and not isinstance(value, int):
        value = value.name  # a member of a foreign enumeration
    try:
        return None if value is None else Priority.parse(value, names)
    except SubscribeError as error:
        raise wrong(inside(where, key), str(error)) from None


# ----------------------------------------------------------------------------------------------------- a whole loop

STAGES = ("train", "val", "test")
_STEPS = ("step", "val_step", "test_step")
_KEYS = ("imports", "model", "wrap", "optimizer", "data", *_STEPS, "metrics", "loop", "default_hooks", "custom_hooks")
_NEEDED = {
    "model": 'the model to train, such as model = "my_module:network"',
    "optimizer": 'such as optimizer = { type = "torch.optim:AdamW", lr = 0.001 }',
    "data.train": 'the data to train on, such as data.train = "my_module:train_loader"',
    "step": 'the function of (model, batch) that returns the loss, such as step = "my_module:step"',
}
# TrainLoop gets these from other keys.
_NOT_OF_LOOP = ("model", "optimizer", *(f"{stage}_data" for stage in STAGES), *_STEPS, "metrics", "bus", "config")


def loop_signature() -> Signature:
    """Return the options of the table ``loop``."""
    signature = Signature(TrainLoop, label="loop")
    signature.options = {name: option for name, option in signature.options.items() if name not in _NOT_OF_LOOP}
    return signature


class Setup:
    """A checked configuration; :meth:`make` makes the loop.

    - ``imports``: modules that ``module:attribute`` may name; they are imported first
    - ``model``, ``optimizer``: one, or a table of several by name; the optimizer's ``params`` are the model's parameters
    - ``wrap``: under ``torchrun``, a function or class that takes the model, for example to shard it;
      ``DistributedDataParallel`` by default, ``false`` for none
    - ``data``: ``train``, ``val``, ``test``; in a process group, each process gets its share
    - ``step``, ``val_step``, ``test_step``: functions of ``(model, batch)``, whose further arguments are bound
    - ``metrics``: by name
    - ``loop``: all other arguments of :class:`TrainLoop`
    - ``default_hooks``: changes to the default hooks by name, see :func:`merged`; ``custom_hooks``: a list of further hooks

    Each object is ``module:attribute``, which is called without arguments, or a table with ``type`` and its arguments.

    Attributes:
        loop: the loop's options by name; you may change them before :meth:`make`.
        tests: True if there is test data.

    Raises:
        ConfigurationError: a key is unknown or missing, a module does not exist, or an option of the loop is invalid.
    """

    def __init__(self, config: Mapping[str, Any], *, default_hooks: Tables | None = None, folders: Sequence[Path] = ()) -> None:
        signature = loop_signature()
        self._defaults = default_hooks or {}
        self._config = {name: _parsed_object(value, deep=name != "loop") for name, value in config.items()}
        inner = [*(f"loop.{name}" for name in signature.options), *(f"default_hooks.{name}" for name in self._defaults)]
        check_keys(self._config, _KEYS, "", "a configuration", further=inner)
        check_keys(data := self._table("data"), STAGES, "data", "data")
        given = {**self._config, "data.train": data.get("train")}
        for name, what in _NEEDED.items():
            if given.get(name) is None:
                raise wrong(name, f"is missing: {what}")
        modules = self._config.get("imports", [])
        if not isinstance(modules, list) or not all(isinstance(one, str) for one in modules):
            raise wrong("imports", f'expected a list of modules, such as ["my_module"], got {modules!r}')
        self._maker = Maker(Imports(modules, folders))
        self.loop = self._maker.decode(signature, self._table("loop"), "loop")
        self.tests = data.get("test") is not None

    def make(self) -> TrainLoop:
        """Create every object in order, and the loop last. ``loop.seed`` seeds the random generators first."""
        if (seed := self.loop.get("seed")) is not None:
            seed_everything(checked_seed(seed))  # before the weights are drawn
        if "device" in self.loop:
            self.loop["device"] = own_device(self.loop["device"])
        model = self._one_or_several("model", self._model)
        optimizer = self._one_or_several("optimizer", partial(self._optimizer, model))
        parts = self._data() | {name: self._step(name) for name in _STEPS if self._config.get(name) is not None}
        bus = Bus()
        self._add_hooks(bus, Maker(self._maker.imports, model=model, optimizer=optimizer))
        metrics = {
            name: self._maker.make(value, inside("metrics", str(name)))
            for name, value in self._table("metrics").items()
            if value is not None
        }
        try:
            return TrainLoop(
                model, optimizer, metrics=metrics, bus=bus, config=all_parsed(dict(self._config)), **parts, **self.loop
            )
        except ConfigurationError as error:
            raise wrong("loop", str(error)) from error

    def _table(self, key: str) -> Mapping[str, Any]:
        value = self._config.get(key)
        if not isinstance(value, Mapping | None):
            raise wrong(key, f"expected a table, got {kind_of(value)}")
        return value or {}

    def _one_or_several(self, key: str, make: Callable[[Any, str, str], Any]) -> Any:
        """Make one object, or the objects of a table by name."""
        value = self._config[key]
        if isinstance(value, Mapping) and "type" not in value and all(isinstance(one, Mapping | str) for one in value.values()):
            return {name: make(one, inside(key, name), name) for name, one in value.items()}
        return make(value, key, "")

    def _model(self, value: Any, where: str, _: str) -> Any:
        """Make a model, and wrap it if there are several processes."""
        model = self._maker.make(value, where, expected=torch.nn.Module)
        wrap = self._config.get("wrap")
        if isinstance(wrap, str | Mapping):
            self._maker.find(wrap, "wrap")  # raises in a single process, too
        elif wrap is not None and wrap is not False:
            raise wrong("wrap", f"expected a function or class, as module:attribute, or false, got {kind_of(wrap)}")
        if wrap is False or world_size() == 1 or is_parallel(model):
            return model
        if (device := self.loop.get("device")) is not None:
            model.to(device_of(device, {}))  # before the wrapper or the optimizer refers to its parameters
        if wrap is None:
            return DistributedDataParallel(model)
        wrapped = Maker(self._maker.imports, module=model, model=model).make(wrap, "wrap")
        if not isinstance(wrapped, torch.nn.Module | None):
            raise wrong("wrap", f"expected a function that returns a Module or changes it in place, got {wrapped!r}")
        return model if wrapped is None else wrapped

    def _optimizer(self, model: Any, value: Any, where: str, name: str) -> Any:
        """Make an optimizer for the model of the same name, or for all models."""
        models = model if isinstance(model, Mapping) else {"": model}
        if name in models:
            model, models = models[name], {name: models[name]}
        parameters = [parameter for one in models.values() for parameter in one.parameters()]
        maker = Maker(self._maker.imports, model=model, params=parameters)
        return maker.make(value, where, expected=torch.optim.Optimizer)

    def _data(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for stage, value in self._table("data").items():
            if value is not None:
                where = inside("data", stage)
                batches = self._maker.make(value, where)
                if not hasattr(batches, "__iter__"):
                    hint = '; wrap a dataset in a loader: { type = "torch.utils.data:DataLoader", dataset = … }'
                    dataset = hint if hasattr(batches, "__getitem__") else ""
                    raise wrong(where, f"expected an iterable of batches, such as a DataLoader, got {batches!r}{dataset}")
                divides = stage == "train" and "global_batch" in self.loop  # the loop does it
                made[f"{stage}_data"] = batches if divides else shared(batches, where, seed=self.loop.get("seed") or 0)
        return made

    def _step(self, name: str) -> Callable[..., Any]:
        step = self._maker.function(self._config[name], name)
        if isinstance(step, type):
            way_out = "name a function, or write a table with the class as type to make an object"
            raise wrong(name, f"{step.__name__} is a class: {way_out}")
        return step

    def _add_hooks(self, bus: Bus, maker: Maker) -> None:
        tables = merged(self._defaults, self._config.get("default_hooks") or {}, "default_hooks")
        defaults = {name: hook_from(entry, maker, inside("default_hooks", name)) for name, entry in tables.items()}
        customs = hooks_in(self._config.get("custom_hooks") or [], maker, "custom_hooks")
        try:
            bus.internal.add_chosen([*defaults.values(), *customs])
        except SubscribeError as error:
            kinds = {type(hook) for hook, _ in customs}
            twice = [f"default_hooks.{name}" for name, (hook, _) in defaults.items() if type(hook) in kinds]
            if not twice:
                raise
            raise wrong("custom_hooks", f"{error}; or change the default hook {', '.join(twice)} instead") from error


def _parsed_object(value: Any, *, deep: bool) -> Any:
    """Parse text of the command line that describes a whole object. Options are parsed later, by their types."""
    if deep and isinstance(value, Mapping) and "type" not in value:
        return {name: parsed(one) for name, one in value.items()}
    return parsed(value)
