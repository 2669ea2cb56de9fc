import pytest
from rich.console import Console

from eventloop import Bus, Event, Hook, Progress, mount
from eventloop.events import AfterTrainIter


class Both(Hook):
    priority = 55

    def after_train_iter(self, event): ...

    @mount(every=100, offload="thread", queue=8, full="drop_old")
    def before_run(self, event): ...


@pytest.fixture
def bus() -> Bus:
    bus = Bus()

    @bus.on("after_val_epoch", every_seconds=30)
    async def ship(event): ...

    bus.on("after_iter", print, priority="LOW")
    bus.on(Event, repr)
    bus.add(Both())
    return bus


def test_rows_are_in_the_order_of_mount_points_and_priorities(bus):
    rows = [(row.mount_point, row.label) for row in bus.describe().rows]
    assert rows == [
        ("before_run", "Both.before_run"),
        ("after_train_iter", "Both.after_train_iter"),
        ("after_train_iter", "print"),
        ("after_val_iter", "print"),
        ("after_val_epoch", "ship"),
        ("after_test_iter", "print"),
        ("event", "repr"),
    ]


def test_rows_show_priority_mode_filter_and_lane(bus):
    first = bus.describe().rows[0]
    assert (first.priority, first.priority_name, first.mode) == (55, "NORMAL+5", "offloaded: thread")
    assert (first.filter, first.lane) == ("every=100", "8 drop_old")
    ship = next(row for row in bus.describe().rows if row.label == "ship")
    assert (ship.mode, ship.filter, ship.lane) == ("offloaded: event loop", "every 30s", "1024 block")
    inline = next(row for row in bus.describe().rows if row.label == "print")
    assert (inline.mode, inline.filter, inline.lane) == ("inline", "", "")


def test_the_table_prints_plain_and_with_rich(bus):
    text = str(bus.describe())
    for word in ("mount point", "after_train_iter", "55 NORMAL+5", "Both", "thread 8 drop_old", "every=100"):
        assert word in text
    console = Console(width=160, color_system=None)
    with console.capture() as captured:
        console.print(bus.describe())
    assert "before_run" in captured.get()


def test_a_mount_point_is_printed_once_above_its_hooks(bus):
    lines = [line.rstrip() for line in str(bus.describe()).splitlines()]
    at = lines.index("after_train_iter")
    assert lines.count("after_train_iter") == 1
    assert lines[at + 1].startswith(" Both ")
    assert lines[at + 2].startswith(" print ")


def test_the_table_fits_a_terminal_of_80_columns(bus):
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(bus.describe(stats=True))
    (both,) = (line for line in captured.get().splitlines() if "every=100" in line)
    assert both.split() == ["Both", "55", "NORMAL+5", "thread", "8", "drop_old", "every=100"]


def test_long_filters_wrap_and_figures_do_not():
    bus = Bus()
    bus.on("after_train_iter", lambda event: None, every=100, after=20000, before=90000, priority=59, offload="thread")
    bus.subscriptions[0].lane.count(delivered=12345)
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(bus.describe(stats=True))
    assert " events" in captured.get()
    assert " 12345" in captured.get()
    assert "…" not in captured.get()
    assert "before=90000" in captured.get()


def test_figures_are_shown_on_request_or_with_timing():
    bus = Bus(timing=True)
    bus.on("after_train_iter", lambda event: None)
    bus.publish(AfterTrainIter(progress=Progress()))
    table = bus.describe()
    assert table.stats
    assert table.rows[0].stats.calls == 1
    assert "events" in str(table)
    assert "events" not in str(Bus().describe())
    assert "events" in str(Bus().describe(stats=True))


def test_dropped_and_failed_events_are_in_the_figures():
    bus = Bus()
    bus.on("after_train_iter", lambda event: 1 / 0, on_error="log")
    bus.publish(AfterTrainIter(progress=Progress()))
    assert "(0 dropped, 1 failed)" in str(bus.describe(stats=True))


def test_an_empty_bus_has_no_rows():
    assert Bus().describe().rows == []
