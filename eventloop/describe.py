"""The hook table: who hears what, in the order of a run."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table

from eventloop.events import Event, lineage, mount_points, resolve
from eventloop.priority import Priority
from eventloop.subscription import Stats, Subscription


class Row(msgspec.Struct, frozen=True):
    """One subscription at one mount point."""

    mount_point: str
    priority: int
    label: str
    priority_name: str
    mode: str
    filter: str
    lane: str
    stats: Stats


class Description(msgspec.Struct, frozen=True):
    """The hook table; print it (plain or with rich), or read ``rows``."""

    rows: list[Row]
    stats: bool = False

    def __rich__(self) -> RenderableType:
        table = Table(title="Hooks in the order of a run", title_justify="left", row_styles=["", "dim"], pad_edge=False)
        for heading in ("mount point", "priority", "hook", "runs", "filter", "lane"):
            table.add_column(heading, overflow="fold")
        if self.stats:
            table.add_column("events", justify="right")
            table.add_column("ms", justify="right")
        previous = ""
        for row in self.rows:
            cells = ["" if row.mount_point == previous else row.mount_point, f"{row.priority_name} ({row.priority})"]
            cells += [row.label, row.mode, row.filter, row.lane]
            table.add_row(*cells, *(_figures(row.stats) if self.stats else ()))
            previous = row.mount_point
        return table

    def __str__(self) -> str:
        console = Console(width=160, color_system=None, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def describe(subscriptions: Iterable[Subscription], *, stats: bool) -> Description:
    """Build the table from subscriptions in dispatch order; those that hear everything come last, once."""
    heard = list(subscriptions)
    rows = [
        _row(name, subscription)
        for name in mount_points()
        for subscription in heard
        if subscription.mount_point != "event" and subscription.mount_point in lineage(resolve(name))
    ]
    rows += [_row("every event", subscription) for subscription in heard if resolve(subscription.mount_point) is Event]
    return Description(rows, stats)


def _row(mount_point: str, subscription: Subscription) -> Row:
    lane = subscription.lane
    return Row(
        mount_point=mount_point,
        priority=subscription.priority,
        label=subscription.label,
        priority_name=Priority.label(subscription.priority),
        mode=_MODES[subscription.mode],
        filter=str(subscription.filter or ""),
        lane="" if lane is None else f"{lane.capacity}, {lane.full}",
        stats=subscription.stats,
    )


_MODES = {"inline": "inline", "async": "offloaded: event loop", "thread": "offloaded: thread"}


def _figures(stats: Stats) -> tuple[str, str]:
    """Events (dropped and failed ones named) and milliseconds on the publishing thread."""
    events = str(stats.delivered or stats.calls or "")
    if stats.dropped or stats.failed:
        events += f" ({stats.dropped} dropped, {stats.failed} failed)"
    return events, f"{stats.seconds * 1e3:.1f}" if stats.calls else ""
