"""The hook table: all subscriptions, in the order of a run; and the table of their counts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import filesize
from rich.console import Console, Group, RenderableType
from rich.table import Table

from trainbus.eventloop import notebook
from trainbus.eventloop.bus.priority import Priority
from trainbus.eventloop.bus.subscription import Stats, Subscription
from trainbus.eventloop.bus.titles import title, without_method
from trainbus.eventloop.events import Event
from trainbus.eventloop.events.event import lineage, mount_points, resolve
from trainbus.eventloop.events.mount_points import BUILTIN
from trainbus.eventloop.terminal import Figures, cell, plain

_TITLE = "Hooks in the order of a run"
_COUNTS = ("delivered", "failed", "dropped", "pending")
_USUAL = "1024 block"  # the lane that a handler gets without options; not shown


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
    ranks: str = "all"


class Description(msgspec.Struct, frozen=True):
    """The hook table; print it (plain or with rich), or read ``rows``."""

    rows: list[Row]
    stats: bool = False
    ranks: bool = False

    def __rich__(self) -> RenderableType:
        # To fit 80 columns, the mount point is above its hooks, and the lane is beside the mode.
        table = Table(title=_TITLE, title_justify="left", box=None, padding=(0, 1, 0, 0))
        table.add_column("mount point, hook", no_wrap=True)
        table.add_column("priority", no_wrap=True)
        table.add_column("runs", overflow="fold")  # this column and the filter wrap in a narrow terminal
        table.add_column("filter", overflow="fold", min_width=8)
        for name in self._more:
            table.add_column(name, justify="left" if name == "ranks" else "right", no_wrap=True)
        previous = ""
        for row in self.rows:
            if row.mount_point != previous:
                table.add_row(cell(row.mount_point), style="bold")
                previous = row.mount_point
            name, *cells = self._cells(row)
            table.add_row(*map(cell, (f" {name}", *cells)), style="cyan" if row.lane else "")
        return table

    def __str__(self) -> str:
        console = Console(width=160, color_system=None, highlight=False, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __repr__(self) -> str:
        return str(self)

    def html(self) -> str:
        """Return the table as HTML, as a notebook shows it."""
        firsts = {id(row) for row in {row.mount_point: row for row in reversed(self.rows)}.values()}
        firsts |= {id(row) for row in self.rows[notebook.left_out(len(self.rows)).stop :][:1]}  # below the rows left out
        rows = [(row.mount_point * (id(row) in firsts), *self._cells(row)) for row in self.rows]
        names = ("mount point", "hook", "priority", "runs", "filter", *self._more)
        return notebook.table(_TITLE, names, rows, left=5 + self.ranks, whole="print(bus.describe())")

    _repr_html_ = html

    @property
    def _more(self) -> list[str]:
        timed = self.stats and any(row.stats.calls for row in self.rows)
        return [*["ranks"] * self.ranks, *["events"] * self.stats, *["ms"] * timed]

    def _cells(self, row: Row) -> list[str]:
        lane = row.lane.removeprefix(_USUAL).removeprefix(", ")
        runs = f"{row.mode.removeprefix('offloaded: ')} {lane}".rstrip()
        name = without_method(row.label, lineage(resolve(row.mount_point)))
        figures = dict(zip(("events", "ms"), _figures(row.stats), strict=True)) | {"ranks": row.ranks}
        return [name, f"{row.priority} {row.priority_name}", runs, row.filter, *(figures[one] for one in self._more)]


def describe(subscriptions: Sequence[Subscription], *, stats: bool, ranks: bool = False) -> Description:
    """Build the table from subscriptions in dispatch order. Subscriptions to ``Event`` or to a user's group come last, once."""
    pairs = [
        (name, one)
        for name in mount_points()
        for one in subscriptions
        if any(heard in lineage(resolve(name)) and not _has_own_row(heard) for heard in one.mount_points)
    ]
    pairs += [(name, one) for one in subscriptions for name in one.mount_points if _has_own_row(name)]
    rows = [
        Row(
            mount_point=name,
            priority=one.priority,
            label=one.label,
            priority_name=Priority.label(one.priority),
            mode="inline" if one.mode == "inline" else f"offloaded: {'event loop' if one.mode == 'async' else one.mode}",
            filter=str(one.filter or ""),
            lane=_lane(one),
            stats=one.stats,
            ranks=one.ranks,
        )
        for name, one in pairs
    ]
    return Description(rows, stats, ranks)


def _has_own_row(mount_point: str) -> bool:
    """Return True for ``Event`` and for groups that users declare, which have one row instead of one per event."""
    event = resolve(mount_point)
    return event is Event or (event.group and mount_point not in BUILTIN)


def _lane(subscription: Subscription) -> str:
    lane = subscription.lane
    if lane is None:
        return ""
    parts = [f"{lane.capacity} {lane.full}"]
    if lane.max_bytes is not None:
        parts.append(filesize.decimal(lane.max_bytes))
    if subscription.timeout is not None:
        parts.append(f"{subscription.timeout:g} s")
    return ", ".join(parts)


def _figures(stats: Stats) -> tuple[str, str]:
    """Return the number of events (with dropped and failed ones), and milliseconds on the publishing thread."""
    events = str(stats.delivered or stats.calls or "")
    if stats.dropped or stats.failed:
        events += f" ({stats.dropped} dropped, {stats.failed} failed)"
    milliseconds = stats.seconds * 1e3
    return events, f"{milliseconds:.{1 if milliseconds < 100 else 0}f}" if stats.calls else ""


class BusStats(dict[Subscription, Stats]):
    """The counts of every subscription: a dict that prints as a table.

    ``seconds`` is time on the publishing thread.
    """

    def __rich__(self) -> RenderableType:
        return Group(*self._blocks())

    def __str__(self) -> str:
        return plain(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return notebook.blocks(*self._blocks())

    def _blocks(self) -> list[Figures | str]:
        counted = [(one, stats) for one, stats in self.items() if one.lane is not None or stats.published]
        timed = any(stats.calls for _, stats in counted)
        names = ("handler", *_COUNTS, *["seconds"] * timed)
        rows = [(title(one.label, one.mount_point), *_cells(stats)) for one, stats in counted]
        others = len(self) - len(counted)
        why = "not called" if timed else "not counted (Bus(timing=True) counts their calls)"
        return [Figures("Events by handler", names, rows), *[f"inline handlers {why}: {others}"] * bool(others)]


def _cells(stats: Stats) -> list[str]:
    return [*(str(getattr(stats, name)) for name in _COUNTS), *[f"{stats.seconds:.3f}"] * bool(stats.calls)]
