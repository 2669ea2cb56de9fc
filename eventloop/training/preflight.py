"""What finds mistakes before a training: a look at the first validation batches, and the metrics that hooks need.

The training takes the look by itself, and so does each of the copies that :mod:`check` trains. It publishes no mount point and
changes nothing that the training could notice: weights, buffers, modes, random states, the loader with its samplers and
workers, and the metrics are as before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainbus.eventloop.bus import Bus, GuestHook, Hook
from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.privates import parts_of
from trainbus.eventloop.training.data import to_device
from trainbus.eventloop.training.loaders import has_state, is_plain, rebuilt
from trainbus.eventloop.training.machine import VAL_ITERATION
from trainbus.eventloop.training.metrics import ONE_NUMBER, Metrics, NamedMetrics, missing_metric, not_a_number
from trainbus.eventloop.training.rng import Generator, random_states, set_random_states
from trainbus.eventloop.training.saved_run import SavedRun
from trainbus.eventloop.training.update import Update
from trainbus.eventloop.user_errors import add_note

log = get_logger()


def check_first_batches(
    run: SavedRun, loader: Iterable[Any], name: str, step: Callable[[Any], Any], metrics: NamedMetrics, count: int
) -> None:
    """Validate the first ``count`` batches by ``step``, which errors call ``name``, and check that hooks find their metrics.

    A metric that cannot be computed is None, with a warning: these batches may be too few for it.

    A loader is not looked at if that would consume it: an iterator, a loader or dataset that holds one, or one with a
    ``state_dict``. All ranks must call it. They look at equal numbers of batches, so that collectives in a model meet.
    """
    try:
        found = _validated(run, loader, step, metrics, count)
    except Exception as error:
        called = f"{name}() is called without gradients, so it must not call backward(), and no mount points are published"
        add_note(
            error, f"in the look at the first {count} batches of val_data before the training: {called}; sanity=0 leaves it out"
        )
        raise
    if found is not None:
        check_needs(run.bus, found, "the look at the first batches of val_data")


def check_needs(bus: Bus, metrics: Mapping[str, Any], what: str, *, sure: bool = True) -> None:
    """Check that ``metrics``, of ``what`` for messages, has what hooks need.

    Raises:
        ConfigurationError: a name is missing, or its value is not a number. It is a log line instead if a handler may report
            it in a validation, or not ``sure``.
    """
    # Hooks of other systems do not know run.report(), and get copies of the metrics, which those that need one only read.
    readers: tuple[type[Hook], ...] = (GuestHook, *(type(hook) for hook in bus.hooks if hook.needs_metrics()))
    reporting = any(bus.internal.may_change_state(event, but=(GuestHook,)) for event in ("before_val_iter", "after_val_iter"))
    sure = sure and not reporting and not bus.internal.may_change_state("after_val_epoch", but=readers)
    for text in unmet_needs(bus, metrics, what):
        if sure:
            raise ConfigurationError(text)
        log.warning(f"{text}; it will fail unless the validation reports it", id="metric-not-reported")


def unmet_needs(bus: Bus, metrics: Mapping[str, Any], what: str) -> Iterator[str]:
    """Yield an error text for each metric that a hook needs (:meth:`Hook.needs_metrics`) and ``what`` did not return."""
    for hook in bus.hooks:
        for name in hook.needs_metrics():
            if several := not_a_number(metrics.get(name)):
                yield f"{hook.label} needs the metric {name!r}, whose value is {several}, not a single number. {ONE_NUMBER}"
            # A metric that is None may have returned a mapping, whose values are `metric/key`.
            elif name not in metrics and metrics.get(name.partition("/")[0], 0) is not None:
                yield str(missing_metric(f"{hook.label} needs", name, metrics, what))


def _validated(
    run: SavedRun, loader: Iterable[Any], step: Callable[[Any], Any], metrics: NamedMetrics, count: int
) -> dict[str, Any] | None:
    """Return the metrics of the first ``count`` batches, or None if the loader or the model cannot be looked at."""
    models = run.models.values()
    with ExitStack() as undo:
        undo.callback(set_random_states, loader, random_states(loader))
        is_built = not any(is_lazy(one) for model in models for one in (*model.parameters(), *model.buffers()))
        batches = (first_batches(loader, count) if is_built else None) or []
        together = run.coordinator.merged(len(batches), min)
        if not together:
            return None
        for model in models:
            _keep(model, undo)
            model.eval()
        undo.enter_context(torch.no_grad())
        measured = Metrics(copies_of(metrics, {}), run.device)
        measured.reset()
        for batch in batches[:together]:
            measured.update(_outputs(run, step, to_device(batch, run.device)))
        return measured.compute(run.coordinator, early=True)


def _outputs(run: SavedRun, step: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
    """Return the outputs of one step, with those that it reports to the run."""
    state = run.state
    update = next((hook for hook in run.bus.hooks if isinstance(hook, Update)), None)
    state.machine.enter(VAL_ITERATION)
    try:
        with nullcontext() if update is None else update.autocast(run.device):
            returned = step(batch)
        return {**state.outputs, **(returned if isinstance(returned, Mapping) else {"loss": returned})}
    finally:
        state.drop_outputs()
        state.machine.leave(VAL_ITERATION)


def _keep(model: torch.nn.Module, undo: ExitStack) -> None:
    """Restore modes, buffers and trainable weights at the end; frozen ones, which can be most of the memory, do not change."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without that import nothing is sharded
    for module in model.modules():
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            undo.callback(module.reshard)  # a forward pass leaves the outermost one with whole parameters
        undo.callback(setattr, module, "training", module.training)
        own = parts_of(module)[1]
        undo.callback(own.update, dict(own))
    kept = [one for one in model.parameters() if one.requires_grad] + list(model.buffers())
    saved = [one.detach().clone() for one in kept]
    for one, value in zip(kept, saved, strict=True):
        undo.callback(one.data.copy_, value)  # `.data`: the version of the tensor stays


def copies_of(metrics: NamedMetrics, memo: dict[int, Any]) -> NamedMetrics:
    """Return copies of metrics. One that cannot be copied stays: each validation begins with its ``reset()``."""
    copies = {}
    for name, metric in metrics.items():
        try:
            copies[name] = copy.deepcopy(metric, memo)
        except (TypeError, RuntimeError):  # it holds a lock, a file, or a tensor within a graph
            copies[name] = metric
    return copies


# ---------------------------------------------------- read the first batches of a loader without changing it


class _WouldChange(Exception):  # noqa: N818 - it is no error
    """Reading would change what is read."""


def first_batches(loader: Iterable[Any], count: int) -> list[Any] | None:
    """Return up to ``count`` batches; None if reading could consume the data or change the order of later passes.

    A DataLoader is rebuilt with a copy of its sampler, and with at most ``count`` workers, which end. The copies share the
    data. The global random states and those of the loader's own ``generator`` advance: the caller restores them.
    """
    try:
        return list(islice(_fresh(loader, count), count))
    except _WouldChange:
        return None


def _fresh(loader: Any, count: int) -> Iterator[Any]:
    """Return an iterator over batches that are not the loader's own."""
    if isinstance(loader, list | tuple):
        return iter(_copied(loader[:count], copy.deepcopy))  # a step may change a batch in place
    if isinstance(loader, DataLoader) and is_plain(loader) and not has_state(loader):
        return iter(_rebuilt(loader, count))
    if isinstance(loader, DataLoader) or hasattr(loader, "base_dataloader"):
        raise _WouldChange  # a subclass with workers and counts of its own
    return _passed(_apart(loader))


def _rebuilt(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    dataset: Any = loader.dataset
    own = _apart(dataset) if isinstance(dataset, Dataset) else dataset
    options: dict[str, Any] = {"dataset": own, "num_workers": min(count, loader.num_workers)}
    if isinstance(dataset, IterableDataset):
        if not loader.num_workers:
            _passed(own)
        return rebuilt(loader, **options, batch_size=loader.batch_size, drop_last=loader.drop_last)
    if loader.batch_sampler is None:
        return rebuilt(loader, **options, batch_size=None, sampler=_drawn(loader.sampler, dataset, count))
    return rebuilt(loader, **options, batch_sampler=_drawn(loader.batch_sampler, dataset, count))


def _drawn(sampler: Any, dataset: Any, count: int) -> list[Any]:
    """Return the first indices (or batches of them) of a copy of the sampler, which shares the dataset."""
    if isinstance(sampler, Iterator) or has_state(sampler):
        raise _WouldChange
    return list(islice(_copied(sampler, lambda one: copy.deepcopy(one, {id(dataset): dataset})), count))


def _passed(source: Any) -> Iterator[Any]:
    """Begin a pass; raise if all passes share one iterator."""
    first: Iterator[Any] = iter(source)
    second = iter(source)
    if first is second:
        raise _WouldChange
    return first


def _apart(source: Any) -> Any:
    """Copy a dataset or loader: the copy shares the data, but has its own attributes, generators and inner datasets."""
    if isinstance(source, Iterator) or has_state(source):
        raise _WouldChange
    made = _copied(source, copy.copy)
    for name, value in getattr(source, "__dict__", {}).items():
        if isinstance(value, Iterator):  # an open file or stream, too
            raise _WouldChange
        if isinstance(value, Generator):
            vars(made)[name] = copy.deepcopy(value)
        elif isinstance(value, Dataset):
            vars(made)[name] = _apart(value)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
            vars(made)[name] = type(value)(map(_apart, value))
    return made


def _copied(source: Any, by: Any) -> Any:
    try:
        return by(source)
    except (TypeError, RuntimeError, NotImplementedError) as error:  # such as a file, a lock, or a tensor within a graph
        raise _WouldChange from error
