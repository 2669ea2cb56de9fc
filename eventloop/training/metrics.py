"""Compute the metrics of a validation: objects with ``update``, ``compute`` and ``reset``, and means of scalar outputs."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Annotated, Any, Final, Protocol, SupportsFloat

import msgspec
import numpy as np
import torch

from trainbus.eventloop.checks import check_options
from trainbus.eventloop.errors import ConfigurationError, TrainingError, stopped
from trainbus.eventloop.log import get_logger
from trainbus.eventloop.spelling import did_you_mean
from trainbus.eventloop.training.coordinator import Coordinator

log = get_logger()

_ALONE: Final = Coordinator()


class Metric(Protocol):
    """The protocol of a metric."""

    @property
    def update(self) -> Any:
        """Accumulate one batch; the parameter names select the entries of the outputs."""

    @property
    def compute(self) -> Any:
        """Return the value over all batches since the last reset: a scalar or a mapping of scalars."""

    @property
    def reset(self) -> Any:
        """Forget all batches."""


_Sums = tuple[dict[str, tuple[float, float]], set[str]]
"""Sum and weight by name, and the names of entries that are not scalars."""

WEIGHT: Final = "batch_size"
"""The output with the weight of a batch in the means of a validation."""

ONE_NUMBER: Final = "Give it an average, or let compute() return a mapping of names to numbers"
"""Advice for a metric whose value is not a single number."""

NamedMetrics = Annotated[
    Mapping[str, Metric], msgspec.Meta(description='a mapping of names to metrics, such as {"accuracy": MulticlassAccuracy()}')
]


class Metrics:
    """Accumulate the metrics of one loader. Each metric gets the entries of the outputs that its ``update`` names.

    Scalar outputs are averaged over samples; an output ``batch_size`` gives the weight of its batch. Without it, batches of
    unknown size have the weight 1, with a warning. Outputs with a metric's name are not averaged, nor are entries that feed a
    metric (except ``loss``). A tensor with one element is a scalar, unless its name had another number of elements before: then
    it comes from the smaller last batch.

    With several ranks, means cover the samples of all ranks, each once. A metric with ``sync_on_compute``
    syncs itself. One with ``merge_state(others)`` is merged from pickled copies. Any other metric covers rank 0 only, with a
    warning; all metrics of a run share the names already warned about (``warned``).
    """

    @check_options
    def __init__(
        self, metrics: NamedMetrics | None = None, device: torch.device | None = None, warned: set[str] | None = None
    ) -> None:
        self._metrics = dict(metrics or {})
        self._device = device
        self._wanted: dict[str, dict[str, bool] | None] = {}
        self._positions: dict[str, list[str]] = {}
        for name, metric in self._metrics.items():
            self._wanted[name], self._positions[name] = _parameters(name, metric)
        self._sums: dict[str, tuple[Any, float]] = {}  # of the scalar entries, with the number of samples
        self._unsized = 0  # batches of unknown size
        self.may_lack = False
        """True to pass over batches without outputs: of a pipeline, only its last stage has some."""
        self._empty = True
        self._warned = set() if warned is None else warned
        # Entries that feed a metric. The loss is averaged all the same.
        self._fed = {entry for wanted in self._wanted.values() for entry in wanted or ()} - {"loss"}
        self._sized: set[str] = set()  # entries that were not a scalar in some batch

    def reset(self) -> None:
        """Reset all metrics, and move those with ``.to()`` to the device."""
        self._sums, self._empty, self._unsized = {}, True, 0
        for name, metric in self._metrics.items():
            _call(name, getattr(metric, "increment", metric.reset))  # a tracker keeps one state for each
            if self._device is not None and callable(move := getattr(metric, "to", None)):
                move(self._device)

    def update(self, outputs: Mapping[str, Any], samples: int | None = 1) -> None:
        """Accumulate the outputs of one batch of ``samples`` samples; 0 skips it, None is an unknown number."""
        if samples == 0 or (self.may_lack and not outputs):
            return
        self._empty = False
        weight = self._weight(outputs, samples)
        for name, metric in self._metrics.items():
            arguments, entries = self._pick(name, outputs)
            _call(name, metric.update, *arguments, **entries)
        for name, value in outputs.items():
            left_out = name == WEIGHT or name in self._metrics or name in self._fed
            scalar = None if left_out else self._scalar(name, value)
            if scalar is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + scalar * weight, count + weight

    def _weight(self, outputs: Mapping[str, Any], samples: int | None) -> float:
        if WEIGHT in outputs:
            given = self._scalar(WEIGHT, outputs[WEIGHT])
            if given is None or not 0 < (weight := float(given)) < math.inf:
                advice = "it weighs the batch in the means of a validation: return the positive number of its samples"
                raise TrainingError(f"the output {WEIGHT!r} is {outputs[WEIGHT]!r}; {advice}")
            return weight
        self._unsized += samples is None
        return samples or 1

    def compute(self, ranks: Coordinator = _ALONE, *, early: bool = False) -> dict[str, Any]:
        """Return all values by name, metrics first; a metric that returns a mapping gives ``name/key``.

        Args:
            ranks: with several, this is a collective. The values cover the batches of all ranks and are equal on each, because
                decisions (the best checkpoint, an early stop) depend on them.
            early: not all batches were seen. A metric that fails is None, with a warning.
        """
        sums, metrics, speaks = self._sums, self._metrics, True
        if self._unsized > 1 and sums and WEIGHT not in self._warned:
            self._warned.add(WEIGHT)
            log.warning(
                "the means of this validation weigh all batches alike, because their sizes are unknown; return the number of "
                f"samples as {WEIGHT!r} from val_step, or report it",
                id="means-unweighted",
                means=[*sums],
            )
        if ranks.size > 1:
            speaks = self._speaks(ranks)
            own = {name: (float(total), count) for name, (total, count) in sums.items() if speaks}
            sums, sized = ranks.merged((own, self._sized), _added)
            sums = {name: one for name, one in sums.items() if name not in sized}  # they are no scalars on some rank
            metrics = self._merged(ranks, speaks=speaks)
        values: dict[str, Any] = {}
        for name, metric in metrics.items():
            try:
                value = _call(name, metric.compute)
            except Exception as error:
                if early:
                    log.warning(
                        "this metric cannot be computed over the first batches",
                        id="metric-not-computed",
                        metric=name,
                        error=repr(error),
                    )
                    values[name] = None
                # Without batches a metric may fail; rank 0's value counts.
                elif speaks and (not self._empty or not ranks.rank or metric is not self._metrics[name]):
                    raise
                continue
            values |= _flat(name, value)
        # Means come last: save_best="auto" takes the first value, which should be a metric that the user named.
        if not early:
            self._tell(values)
        values |= {name: _number(total / count) for name, (total, count) in sums.items() if name not in values}
        if ranks.layout.data.shares:  # rank 0 may have seen no outputs
            return dict(ranks.merged(values if speaks else {}, lambda lower, higher: lower or higher))
        return dict(ranks.from_first(lambda: values))

    def _speaks(self, ranks: Coordinator) -> bool:
        """Return True if this rank's batches count. Of ranks with the same batches, the first that has outputs speaks."""
        data = ranks.layout.data
        if not data.shares:
            return True
        own = {} if self._empty else {data.rank: ranks.rank}
        return ranks.merged(own, lambda lower, higher: higher | lower).get(data.rank) == ranks.rank

    def _tell(self, values: Mapping[str, Any]) -> None:
        """Log once which values are not one number."""
        several = {name: found for name, value in values.items() if (found := not_a_number(value))}
        for name in [name for name in several if f"{name} is several" not in self._warned]:
            self._warned.add(f"{name} is several")
            log.info(
                "loggers, the record and charts leave this metric out, because it is not a single number; event.metrics and "
                f"loop.validate() have it. {ONE_NUMBER}",
                metric=name,
                value=several[name],
            )

    def _merged(self, ranks: Coordinator, *, speaks: bool) -> dict[str, Metric]:
        """Merge the metrics that can be merged over all ranks that speak; return all of them."""
        alone = {name: metric for name, metric in self._metrics.items() if not _syncs(metric)}
        able = {name: metric for name, metric in alone.items() if callable(getattr(metric, "merge_state", None))}
        merged = self._metrics | ranks.merged(copy.deepcopy(able) if speaks else {}, _merge)
        for name, metric in alone.items():
            if name not in able and name not in self._warned:
                self._warned.add(name)
                log.warning(
                    "this metric covers only the batches of rank 0; give it merge_state(others) to cover all ranks",
                    id="metric-of-rank-0",
                    metric=name,
                    type=type(metric).__name__,
                )
        return merged

    def _scalar(self, name: str, value: Any) -> torch.Tensor | float | None:
        elements = value.numel() if isinstance(value, torch.Tensor) else value.size if isinstance(value, np.ndarray) else 1
        if elements != 1:
            self._sized.add(name)
        if elements != 1 or (name in self._sized and getattr(value, "ndim", False)):
            return None
        if isinstance(value, torch.Tensor):
            return None if value.is_complex() else value.detach().double().reshape(())
        if isinstance(value, np.ndarray | np.generic):
            value = value.item()
        return float(value) if isinstance(value, int | float) else None

    def takes(self, entry: str) -> bool:
        """Return True if a metric takes this entry of the outputs."""
        return any(wanted is None or entry in wanted for wanted in self._wanted.values())

    def _pick(self, name: str, outputs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of ``update``: by position up to the first that is missing, and the rest by name."""
        wanted = self._wanted[name]
        if wanted is None:
            return [], dict(outputs)
        missing = [entry for entry, required in wanted.items() if required and entry not in outputs]
        if missing:
            raise TrainingError(
                f"metric {name!r} needs {', '.join(map(repr, missing))}, but the step's outputs have "
                f"{', '.join(map(repr, outputs)) or 'nothing'}: return a dict with these entries from val_step"
            )
        entries = {entry: outputs[entry] for entry in wanted if entry in outputs}
        positions = takewhile(entries.__contains__, self._positions[name])
        return [entries.pop(entry) for entry in list(positions)], entries


def not_a_number(value: Any) -> str:
    """Describe a value that is not a single number, such as ``"a Tensor of shape (3,)"``; empty for a number and for None."""
    kind = f"a{'n' if type(value).__name__[0] in 'aeiou' else ''} {type(value).__name__}"
    if isinstance(value, torch.Tensor | np.ndarray):
        elements = math.prod(value.shape)
        return "" if elements == 1 else f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"{kind} of {len(value)}"
    return "" if value is None or isinstance(value, SupportsFloat) else kind


def missing_metric(subject: str, metric: str, metrics: Mapping[str, Any], what: str = "this validation") -> TrainingError:
    """Return the error for a validation without ``metric``. The message begins with ``subject``."""
    there = ", ".join(map(repr, metrics)) or "none"
    return TrainingError(
        f"{subject} the metric {metric!r}, which {what} did not return{did_you_mean(metric, metrics)}; it returned {there}"
    )


def _parameters(name: str, metric: Metric) -> tuple[dict[str, bool] | None, list[str]]:
    """Map the parameters of ``metric.update`` to whether each is required, and list those to give by position.

    An ``update(*args, **kwargs)`` passes them on to the metrics that the metric holds, as wrappers of metrics do. They
    are given by position if all of these agree on it, because some wrappers transform ``args`` only. None is any keyword.
    """
    lacking = [method for method in ("update", "compute", "reset") if not callable(getattr(metric, method, None))]
    if lacking:
        raise ConfigurationError(f"metric {name!r} ({type(metric).__name__}) has no {' and no '.join(lacking)}()")
    parameters = inspect.signature(metric.update).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        held = [_parameters(name, one) for one in _held(metric)] if inspect.Parameter.VAR_POSITIONAL in kinds else []
        wanted: dict[str, bool] = {}
        for theirs, _ in held:
            if theirs is None:
                return None, []
            wanted |= {entry: required or wanted.get(entry, False) for entry, required in theirs.items()}
        alike = held and all(one == held[0] for one in held)
        return wanted if held else None, held[0][1] if alike else []
    return (
        {one.name: one.default is one.empty for one in parameters if one.kind is not one.VAR_POSITIONAL},
        [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)],
    )


def _held(metric: Any) -> Iterator[Metric]:
    """Yield the metrics inside a module, the outermost ones."""
    for one in metric.children() if isinstance(metric, torch.nn.Module) else ():
        if callable(getattr(one, "update", None)) and callable(getattr(one, "compute", None)):
            yield one
        else:
            yield from _held(one)


def _syncs(metric: Any) -> bool:
    """Return True if a metric, or each that it holds, exchanges its state with other ranks itself."""
    held = [*_held(metric)]
    return bool(getattr(metric, "sync_on_compute", False) or (held and all(map(_syncs, held))))


def _call(name: str, method: Callable[..., Any], *arguments: Any, **entries: Any) -> Any:
    """Call a method of a metric; turn StopIteration, which would end the validation, into an error."""
    try:
        return method(*arguments, **entries)
    except StopIteration as error:
        raise stopped(error, f"{method.__name__}() of metric {name!r}") from error


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: _number(value)}
    return {inner: one for key, entry in value.items() for inner, one in _flat(f"{name}/{key}", entry).items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _merge(metrics: dict[str, Metric], others: dict[str, Metric]) -> dict[str, Metric]:
    if not (metrics and others):
        return metrics or others
    for name, metric in metrics.items():
        _call(name, metric.merge_state, [others[name]])  # type: ignore[attr-defined]  # looked at by the caller
    return metrics


def _added(mine: _Sums, others: _Sums) -> _Sums:
    """Add sums and counts, and unite the names of what is not a scalar."""
    added = dict(mine[0])
    for name, (more, number) in others[0].items():
        total, count = added.get(name, (0.0, 0))
        added[name] = total + more, count + number
    return added, mine[1] | others[1]
