"""``expensive``: the most expensive things of a run in plain sentences, each with its figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from trainbus.observe.costs import Costs, Growth, LaneCosts, Part
from trainbus.observe.ranks import slow_at

_HOOK: Final = 0.03  # shares of the wall time from which on a thing matters
_DATA: Final = 0.05
_VALIDATION: Final = 0.25
_STALL: Final = 0.01
_BUSY: Final = 0.8  # of the time in its handler: a lane that lingers holds events, too, and does not fill
_FILLING: Final = 0.02  # of the capacity
_LEAK: Final = 0.01  # of the resident memory, within one window
_LEAST: Final = 16 << 20  # bytes

_UNSEEN: Final = (
    ". No hook or handler was found to keep it: look at the loop, the model and the data. A list of losses keeps their "
    "graphs: append loss.item(). tracemalloc finds other Python objects"
)

_Weighed = tuple[float, str]


def expensive(costs: Costs, most: int = 3) -> list[str]:
    """Return a sentence for each of the most expensive things that matter, the worst one first.

    - waiting for data, from 5 % of the time;
    - validation, from 25 %;
    - a hook, from 3 %;
    - a full lane or checkpoints, from 1 %;
    - lost events, a lane that fills, growing memory, and a rank that the others wait for.
    """
    kinds = (_data, _validation, _hooks, _lanes, _checkpoints, _memory, _ranks)
    found = [one for kind in kinds for one in kind(costs)]
    return [sentence for _, sentence in sorted(found, key=lambda one: -one[0])[:most]]


def held_up(costs: Costs) -> float:
    """Return the seconds for which checkpoints held training up."""
    return sum(part.seconds for part in costs.parts if part.name in _CHECKPOINTS)


def duration(seconds: float) -> str:
    """Return a time with two or three digits and its unit, such as ``"4.1 ms"``."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * (1 if unit in ("s", "ms") else 2):
            return f"{seconds / size:.3g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def size(number: float) -> str:
    """Return a number of bytes with its unit, such as ``"118 MB"``."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def hook_of(name: str) -> str:
    """Return the hook's part of a method's name: ``"EMAHook"`` for ``"EMAHook.after_train_iter"``."""
    return name.rpartition(".")[0] or name


def _data(costs: Costs) -> Iterator[_Weighed]:
    for part in costs.parts:
        if part.name == "waiting for data" and part.share >= _DATA:
            each = _each(part.seconds, costs.steps.total)
            yield part.share, f"{_percent(part.share)} of the time is waiting for data{each}."


def _validation(costs: Costs) -> Iterator[_Weighed]:
    for part in costs.parts:
        if part.name == "validation" and part.share >= _VALIDATION:
            yield part.share, f"Validation takes {_percent(part.share)} of the time ({duration(part.seconds)})."


def _hooks(costs: Costs) -> Iterator[_Weighed]:
    parts: dict[str, list[Part]] = defaultdict(list)
    for part in costs.parts:
        if part.group in ("hook", "hand-off"):
            parts[hook_of(part.name)].append(part)
    for name, own in parts.items():
        share, seconds = sum(part.share for part in own), sum(part.seconds for part in own)
        if share >= _HOOK:
            worst = max(own, key=lambda part: part.seconds)
            often = 2 * worst.calls >= costs.steps.total
            each = _each(seconds, costs.steps.total) if often else f": {duration(worst.mean)} a call at {worst.mount_point}"
            yield share, f"{name} takes {_percent(share)} of the time{each}."


def _lanes(costs: Costs) -> Iterator[_Weighed]:
    for lane in costs.lanes:
        share, name = lane.waited / max(costs.wall, 1e-9), hook_of(lane.name)
        if share >= _STALL:
            yield share, f"Training waits {_percent(share)} of the time for the full lane of {name}{_speed(lane)}."
        if lane.dropped:
            all_of_it = lane.dropped + lane.delivered + lane.failed + lane.pending
            lost = f"The lane of {name} dropped {lane.dropped} of {all_of_it} events{_speed(lane)}."
            yield lane.dropped / all_of_it, lost
        elif share < _STALL and (used := _used(lane)) >= _FILLING and lane.seconds >= _BUSY * costs.wall:
            until = costs.wall * (lane.capacity - lane.pending) / lane.pending
            yield (
                min(used, share + _STALL),
                (
                    f"The lane of {name} fills{_speed(lane)}, and {lane.pending:,} of at most {lane.capacity:,} events wait. "
                    f"At this pace it is full in about {duration(until)}; then {_THEN[lane.full]}."
                ),
            )


def _used(lane: LaneCosts) -> float:
    """Return the share of a lane that is used; 0 of a full one, and where the capacity is unknown."""
    return lane.pending / lane.capacity if lane.pending < lane.capacity else 0.0


_THEN: Final = {
    "block": "training waits for it",
    "drop_old": "the oldest events are dropped",
    "drop_new": "new events are dropped",
    "latest": "all events but the newest are dropped",
    "raise": "training ends with an error",
}


_CHECKPOINTS: Final = ("copying for checkpoints", "waiting for checkpoints", "writing checkpoints")


def _checkpoints(costs: Costs) -> Iterator[_Weighed]:
    own = [part for part in costs.parts if part.name in _CHECKPOINTS]
    share, seconds = sum(part.share for part in own), held_up(costs)
    if share >= _STALL:
        waits = any(part.name == "waiting for checkpoints" and 2 * part.seconds > seconds for part in own)
        why = ", mostly because the one before was still being written" if waits else ""
        yield share, f"Checkpoints hold training up for {_percent(share)} of the time ({duration(seconds)}{why})."


def _memory(costs: Costs) -> Iterator[_Weighed]:
    grown = {one.name: one for one in costs.growth}
    process = grown.pop("process", None)
    if process is None or process.bytes < max(_LEAST, _LEAK * costs.memory):
        return
    hooks = [one for one in grown.values() if one.bytes > 0]
    suspect = max(
        hooks, key=lambda one: (_per_iteration(one) > _per_iteration(process) / 2, one.graphs, one.bytes), default=None
    )
    whose = _UNSEEN if suspect is None else _keeps(suspect)
    sentence = f"Memory grew by {size(process.bytes)} in {duration(process.seconds)}, {process.iterations} iterations{whose}."
    yield min(1.0, process.bytes / max(costs.memory, 1)), sentence


def _keeps(suspect: Growth) -> str:
    if suspect.graphs:
        return (
            f"; {suspect.name} keeps more and more tensors with their history of gradients: keep loss.item() or "
            "tensor.detach() instead"
        )
    return f"; {suspect.name} keeps {size(_per_iteration(suspect))} more each iteration"


def _per_iteration(growth: Growth) -> float:
    return growth.bytes / max(growth.iterations, 1)


def _ranks(costs: Costs) -> Iterator[_Weighed]:
    if costs.ranks is not None and (slow := costs.ranks.straggler) is not None:
        share = slow.waited / max(costs.ranks.seconds, 1e-9)
        yield share, f"The other ranks wait {_percent(share)} of the time for rank {slow.rank} ({slow.host}): {slow_at(slow)}."


def _each(seconds: float, iterations: int) -> str:
    return f": {duration(seconds / iterations)} an iteration" if iterations else f": {duration(seconds)}"


def _speed(lane: LaneCosts) -> str:
    done = lane.delivered + lane.failed
    return f": its handler takes {duration(lane.seconds / done)} an event" if done and lane.seconds else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
