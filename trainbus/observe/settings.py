"""``settings_of``: what distinguishes a run from others, without ``config=``: rates, sizes, schedules, options of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from trainbus.eventloop import get_logger
from trainbus.eventloop.checkpoint import unwrapped
from trainbus.eventloop.checks import options_of
from trainbus.eventloop.events import Progress, RunView
from trainbus.eventloop.plain import plain, without_secrets
from trainbus.eventloop.training import GlobalBatchSampler, Update
from trainbus.hooks.schedule import ParamSchedulerHook

log = get_logger()

_MOST = 2_000  # settings of a run


def settings_of(run: RunView, progress: Progress) -> dict[str, Any]:
    """Return the settings of a run when its training begins, by dotted name. Reads no tensor on a device.

    A part that cannot be read, such as the options of a hook with a strange constructor, is left out with a warning.
    """
    found: dict[str, Any] = {}
    for part in (_optimizers, _data, _schedules, _model, _hooks):
        found |= _read(part.__name__.strip("_"), partial(part, run))
    found |= _limits(run, progress) | dict(run.foreign.settings)
    return {name: without_secrets(plain(value), name.rpartition(".")[2]) for name, value in list(found.items())[:_MOST]}


def data_settings(run: RunView) -> dict[str, Any]:
    """Return the settings of the training data, at the beginning of an epoch: your own loop knows its loader only then."""
    return _read("data", partial(_data, run), warns=False)


def _read(part: str, read: Callable[[], Mapping[str, Any]], *, warns: bool = True) -> dict[str, Any]:
    try:
        return dict(read())
    except Exception as error:  # noqa: BLE001 - the objects are the user's; no run ends because of its record
        if warns:
            log.warning("some settings of the run cannot be recorded", id="settings-not-recorded", part=part, error=repr(error))
        return {}


def _optimizers(run: RunView) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for index, (name, given) in enumerate(run.optimizers.items()):
        optimizer = getattr(given, "optimizer", given)  # Accelerate's wrapper
        path = "optimizer" if len(run.optimizers) == 1 else f"optimizer.{name}"
        groups = [_group(one) for one in optimizer.param_groups]
        if not index and "lr" in groups[0]:
            settings["lr"] = groups[0]["lr"]
        settings[path] = type(optimizer).__name__
        if len(groups) > 1:
            settings[f"{path}.groups"] = len(groups)
        if path == "optimizer":
            groups[0].pop("lr", None)
        for place, group in enumerate(groups):
            own = {key: value for key, value in group.items() if not place or groups[0].get(key, settings.get(key)) != value}
            settings |= {f"{path}.{place}.{key}" if place else f"{path}.{key}": value for key, value in own.items()}
    return settings


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group: of a scheduled rate, the one that the schedule begins from."""
    options = {name: _number(value) for name, value in group.items() if name not in ("params", "initial_lr", "param_names")}
    if "initial_lr" in group:
        options["lr"] = _number(group["initial_lr"])
    return {name: value for name, value in options.items() if value is not None}


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return plain(value)
    return value.item() if value.is_cpu and value.numel() == 1 else None  # reading another device would wait for it


def _data(run: RunView) -> dict[str, Any]:
    loader: Any = run.data.train
    if loader is None:
        return {}
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, GlobalBatchSampler):
        return {"batch_size": -(-sampler.global_batch // max(1, run.world_size * sampler.accumulate))} | {
            "global_batch": sampler.global_batch
        }
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if size is None and isinstance(loader, Sequence) and len(loader):
        size = next((len(one) for one in _tensors(loader[0]) if one.dim()), None)
    return {"batch_size": int(size)} if isinstance(size, int) else {}


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for one in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(one)


def _limits(run: RunView, progress: Progress) -> dict[str, Any]:
    limits = {
        "max_epochs": progress.max_epochs,
        "max_iters": progress.max_iters,
        "accumulate": run.steps.accumulation,
        "seed": run.seed,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _model(run: RunView) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": run.device.type, "world_size": run.world_size}
    several = len(run.models) > 1
    total = trained = 0
    dtypes: dict[torch.dtype, int] = {}
    for name, model in run.models.items():
        settings[f"model.{name}" if several else "model"] = type(model if several else unwrapped(run.model)).__name__
        for one in model.parameters():
            if isinstance(one, torch.nn.UninitializedParameter):
                continue
            total += one.numel()
            trained += one.numel() if one.requires_grad else 0
            dtypes[one.dtype] = dtypes.get(one.dtype, 0) + one.numel()
    settings |= {"parameters": total, "trainable": trained}
    mixed = next((amp for hook in run.bus.hooks if isinstance(hook, Update) and (amp := options_of(hook).get("amp"))), None)
    weights = str(max(dtypes, key=lambda dtype: dtypes[dtype])).removeprefix("torch.") if dtypes else None
    precision = mixed or weights
    return settings if precision is None else settings | {"precision": precision}


def _schedules(run: RunView) -> dict[str, Any]:
    own = [one for hook in run.bus.hooks if isinstance(hook, ParamSchedulerHook) for one in hook.schedulers.values()]
    schedules = [*own, *(one for one in run.foreign.schedulers if hasattr(one, "step"))]
    settings: dict[str, Any] = {"schedule": ", ".join(type(one).__name__ for one in schedules)} if schedules else {}
    for index, one in enumerate(schedules):
        path = f"schedule.{index}" if index else "schedule"
        plain_ones = {name: value for name, value in vars(one).items() if not name.startswith("_") and name not in _MOVES}
        settings |= {
            f"{path}.{name}": plain(value) for name, value in plain_ones.items() if isinstance(value, bool | int | float | str)
        }
    return settings


_MOVES = ("last_epoch", "base_lrs", "verbose", "best", "num_bad_epochs", "cooldown_counter", "mode_worse")
"""Attributes of torch's schedulers that are no options."""


def _hooks(run: RunView) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    labels: dict[str, int] = {}
    for hook in run.bus.hooks:
        number = labels[hook.label] = labels.get(hook.label, 0) + 1
        path = f"hooks.{hook.label}" if number == 1 else f"hooks.{hook.label}-{number}"
        settings[path] = True
        options = _read(path, partial(options_of, hook))
        settings |= {f"{path}.{name}": value for name, value in _flat(options)}
    return settings


def _flat(options: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
