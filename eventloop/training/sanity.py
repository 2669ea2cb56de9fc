"""A look at the first validation batches before a training: mistakes in names and steps are found after seconds, not an epoch.

It publishes no mount point and changes nothing that the training could notice: weights, buffers, modes, random states, the
loader with its samplers and workers, and the metrics are as before.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from eventloop.bus import Bus, GuestHook, Hook
from eventloop.errors import ConfigurationError
from eventloop.log import get_logger
from eventloop.privates import parts_of
from eventloop.training.data import to_device
from eventloop.training.first_batches import first_batches
from eventloop.training.metrics import Metrics, NamedMetrics, missing_metric
from eventloop.training.rng import random_states, set_random_states
from eventloop.training.update import Update

log = get_logger()


def look(
    run: Any, loader: Iterable[Any], step: Callable[[Any], Any], metrics: NamedMetrics, count: int
) -> dict[str, Any] | None:
    """Validate the first ``count`` batches; return the metrics, or None if nothing can be looked at.

    A metric that cannot be computed is None, with a warning: these batches may be too few for it.

    A loader is not looked at if that would consume it: an iterator, a loader or dataset that holds one, or one with a
    ``state_dict``. All ranks must call it. They look at equal numbers of batches, so that collectives in a model meet.
    """
    models = run.models.values()
    with ExitStack() as undo:
        undo.callback(set_random_states, loader, random_states(loader))
        is_built = not any(is_lazy(one) for model in models for one in (*model.parameters(), *model.buffers()))
        batches = (first_batches(loader, count) if is_built else None) or []
        ranks = run.state.ranks
        together = len(batches) if ranks is None else min(ranks.gather(len(batches)))
        if not together:
            return None
        for model in models:
            _keep(model, undo)
            model.eval()
        undo.enter_context(torch.no_grad())
        measured = Metrics(_copies(metrics), run.device)
        measured.reset()
        for batch in batches[:together]:
            measured.update(_outputs(run, step, to_device(batch, run.device)))
        return measured.compute(ranks, early=True)


def check_needs(bus: Bus, metrics: Mapping[str, Any], what: str, *, sure: bool = True) -> None:
    """Check that ``metrics``, of ``what`` for messages, has the names that hooks need (:meth:`Hook.needs_metrics`).

    Raises:
        ConfigurationError: a name is missing. It is a log line if a handler may report it in a validation, or not ``sure``.
    """
    needs = [(hook, hook.needs_metrics()) for hook in bus.hooks]
    # Hooks of other systems do not know run.report(), and get copies of the metrics, which those that need one only read.
    readers: tuple[type[Hook], ...] = (GuestHook, *(type(hook) for hook, names in needs if names))
    reporting = any(bus.may_change_state(event, but=(GuestHook,)) for event in ("before_val_iter", "after_val_iter"))
    sure = sure and not reporting and not bus.may_change_state("after_val_epoch", but=readers)
    for hook, names in needs:
        for name in names:
            # A metric that is None may have returned a mapping, whose values are `metric/key`.
            if name not in metrics and metrics.get(name.partition("/")[0], 0) is not None:
                error = missing_metric(f"{hook.label} needs", name, metrics, what)
                if sure:
                    raise ConfigurationError(str(error))
                log.warning(f"{error}; it will fail unless the validation reports it")


def _outputs(run: Any, step: Callable[[Any], Any], batch: Any) -> dict[str, Any]:
    """Return the outputs of one step, with those that it reports to the run."""
    state = run.state
    update = next((hook for hook in run.bus.hooks if isinstance(hook, Update)), None)
    state.scopes.enter("val iter")
    try:
        with nullcontext() if update is None else update.autocast(run.device):
            returned = step(batch)
        return {**state.outputs, **(returned if isinstance(returned, Mapping) else {"loss": returned})}
    finally:
        state.drop_outputs()
        state.scopes.leave("val iter")


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


def _copies(metrics: NamedMetrics) -> NamedMetrics:
    """Return copies of metrics. One that cannot be copied stays: each validation begins with its ``reset()``."""
    copies = {}
    for name, metric in metrics.items():
        try:
            copies[name] = copy.deepcopy(metric)
        except (TypeError, RuntimeError):  # it holds a lock, a file, or a tensor within a graph
            copies[name] = metric
    return copies


@contextmanager
def explained(count: int, step: str) -> Iterator[None]:
    """Add to an error of the look where it comes from, and how to do without the look."""
    try:
        yield
    except Exception as error:
        called = f"{step}() is called without gradients, so it must not call backward(), and no mount points are published"
        error.add_note(
            f"in the look at the first {count} batches of val_data before the training: {called}; sanity=0 leaves it out"
        )
        raise
