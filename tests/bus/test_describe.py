import pytest

from trainbus.eventloop import Bus, Event, Hook, Progress, mount
from trainbus.eventloop.events import AfterTrainIter
from trainbus.eventloop.terminal import plain


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


def test_rows_are_in_order_and_show_priority_mode_filter_and_lane(bus):
    found = [(row.mount_point, row.label, row.priority_name, row.mode, row.filter, row.lane) for row in bus.describe().rows]
    assert found == [
        ("before_run", "Both.before_run", "NORMAL+5", "offloaded: thread", "every=100", "8 drop_old"),
        ("after_train_iter", "Both.after_train_iter", "NORMAL+5", "inline", "", ""),
        ("after_train_iter", "print", "LOW", "inline", "", ""),
        ("after_val_iter", "print", "LOW", "inline", "", ""),
        ("after_val_epoch", "ship", "NORMAL", "offloaded: event loop", "every 30s", "1024 block"),
        ("after_test_iter", "print", "LOW", "inline", "", ""),
        ("event", "repr", "NORMAL", "inline", "", ""),
    ]
    assert Bus().describe().rows == []


def test_the_table_prints_each_mount_point_once_and_fits_80_columns(bus):
    lines = [line.rstrip() for line in str(bus.describe()).splitlines()]
    assert "mount point" in lines[0] or "mount point" in lines[1]
    at = lines.index("after_train_iter")
    assert lines.count("after_train_iter") == 1
    assert lines[at + 1].startswith(" Both ")
    assert lines[at + 2].startswith(" print ")
    (both,) = (line for line in plain(bus.describe(stats=True)).splitlines() if "every=100" in line)
    assert both.split() == ["Both", "55", "NORMAL+5", "thread", "8", "drop_old", "every=100"]


def test_long_filters_wrap_and_figures_do_not():
    bus = Bus()
    bus.on("after_train_iter", lambda event: None, every=100, after=20000, before=90000, priority=59, offload="thread")
    bus.subscriptions[0].lane.count(delivered=12345)
    text = plain(bus.describe(stats=True))
    for figure in (" events", " 12345", "before=90000"):
        assert figure in text
    assert "…" not in text


def test_figures_are_shown_on_request_or_with_timing():
    bus = Bus(timing=True)
    bus.on("after_train_iter", lambda event: None)
    bus.on("after_train_iter", lambda event: 1 / 0, on_error="log")
    bus.publish(AfterTrainIter(progress=Progress()))
    table = bus.describe()
    assert table.stats
    assert table.rows[0].stats.calls == 1
    assert "(0 dropped, 1 failed)" in str(table)
    assert "events" in str(table)
    assert "events" not in str(Bus().describe())
    assert "events" in str(Bus().describe(stats=True))
