"""``BusStats``: the counts of all subscriptions, to print or to read."""

from __future__ import annotations

from rich.console import Group, RenderableType

from eventloop.bus.figures import Figures, plain
from eventloop.bus.handler import title
from eventloop.bus.subscription import Stats, Subscription

_COUNTS = ("delivered", "failed", "dropped", "pending")


class BusStats(dict[Subscription, Stats]):
    """The counts of every subscription: a dict that prints as a table.

    ``seconds`` is time on the publishing thread.
    """

    def __rich__(self) -> RenderableType:
        counted = [(one, stats) for one, stats in self.items() if one.lane is not None or stats.published]
        timed = any(stats.calls for _, stats in counted)
        names = ("handler", *_COUNTS, *["seconds"] * timed)
        rows = [(title(one.label, one.mount_point), *_cells(stats)) for one, stats in counted]
        others = len(self) - len(counted)
        why = "not called" if timed else "not counted (Bus(timing=True) counts their calls)"
        return Group(Figures("Events by handler", names, rows), *[f"inline handlers {why}: {others}"] * bool(others))

    def __str__(self) -> str:
        return plain(self)


def _cells(stats: Stats) -> list[str]:
    return [*(str(getattr(stats, name)) for name in _COUNTS), *[f"{stats.seconds:.3f}"] * bool(stats.calls)]
