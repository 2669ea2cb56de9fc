"""TraceHook writes trace.json: which iterations, which tracks, what arrows, and what becomes of it when a run is cut short."""

import gc
import os
import time

import anyio
import pytest

from trainbus.eventloop import Bus, ConfigurationError, Event
from trainbus.hooks import CheckpointHook, EMAHook
from trainbus.observe import TraceHook

from ..failing import fails
from ..hooks.conftest import batches, make_loop
from ..observe.traces import Picture

FILE = "trace.json"


def traced(folder, *hooks, first=2, iterations=3, bus=None, **options):
    """Return the picture of a run."""
    make_loop(*hooks, TraceHook(first=first, iterations=iterations), work_dir=folder, bus=bus, **options).run()
    picture = Picture(folder / FILE)
    picture.check()
    return picture


def test_the_window_has_exactly_the_iterations_that_were_asked_for_with_parts_and_hooks_by_name(tmp_path):
    picture = traced(tmp_path, EMAHook(), first=2, iterations=3)
    assert picture.iterations == [2, 3, 4]
    names = [one.name for one in picture.track("training")]
    assert names.count("before_train_iter") == names.count("after_train_iter") == names.count("step") == 3
    assert {*names} >= {"forward", "backward", "optimizer step", "waiting for data", "EMAHook.after_train_iter"}


def test_data_and_hooks_are_not_both_in_the_same_time(tmp_path, bus):
    bus.on("after_train_epoch", "before_val", lambda event: time.sleep(0.001))
    training = traced(tmp_path, bus=bus, first=0, iterations=8, val_data=batches(1)).track("training")
    waits = [one for one in training if one.name == "waiting for data"]
    assert waits
    others = [one for one in training if one.kind in ("hook", "event")]
    for wait in waits:
        assert not [one for one in others if wait.begin < one.end and one.begin < wait.end]


class PlotMade(Event):
    """A handler has made a plot."""


def test_each_lane_has_a_track_and_arrows_from_its_events_and_a_counter_of_its_queue(tmp_path, bus):
    bus.on(PlotMade, lambda event: None)

    @bus.on("after_train_iter")
    async def ship(event):
        await anyio.sleep(0.002)

    @bus.on("after_train_iter")
    async def send(event):
        await anyio.sleep(0.003)

    @bus.on("after_train_iter", offload="thread")
    def plot(event):
        time.sleep(0.001)
        bus.publish(PlotMade())

    @bus.on("after_train_iter", offload="thread", batch=100)
    def plots(events):
        time.sleep(0.001)

    picture = traced(tmp_path, bus=bus, first=2, iterations=3)
    for name in ("ship", "send", "plot", "plots"):
        assert name == "plot" or {one.name for one in picture.track(name)} == {name}
        arrows = [(source, target) for source, target in picture.arrows("delivery") if target.name == name]
        assert len(arrows) == 3
        assert {source.name for source, _ in arrows} == {f"hand-off to {name}"}
        assert picture.counters(f"pending: {name}")[0] >= 0
    calls, events = ([one for one in picture.track("plot") if one.name == name] for name in ("plot", "plot_made"))
    assert len(calls) >= 3
    assert all(any(call.begin <= one.begin and one.end <= call.end for one in events) for call in calls)
    assert max(picture.counters("memory of the process")) > 0


@pytest.mark.long
def test_a_worker_process_has_a_track_that_lies_within_the_calls_of_its_lane(tmp_path, bus):
    bus.on("after_train_iter", os.path.exists, offload="process", capture=lambda event: str(event.progress.iter))
    bus.on("after_train_iter", lambda event: bus.drain(), priority="LOWEST")  # the end waits 10 s only
    picture = traced(tmp_path, bus=bus, first=2, iterations=2)
    [worker] = [name for name in picture.names.values() if name.startswith("process ")]
    assert worker.endswith(" of exists")
    calls = picture.track("exists")
    assert len(picture.track(worker)) >= 2
    for work in picture.track(worker):
        assert any(call.begin <= work.begin and work.end <= call.end for call in calls)


def test_an_arrow_goes_from_the_request_of_a_checkpoint_to_its_commit(tmp_path, bus):
    bus.on("checkpoint_committed", lambda event: None)
    picture = traced(tmp_path, CheckpointHook(interval=2, by_epoch=False), bus=bus, first=2, iterations=6)
    arrows = picture.arrows("checkpoint")
    assert len(arrows) == 2
    for source, target in arrows:
        assert source.name == "requesting checkpoints"
        assert target.name == "checkpoint_committed"
    names = [one.name for one in picture.track("trainbus-saver")]
    assert names.count("checkpoint_committed") >= 2


@pytest.mark.long
def test_garbage_collections_are_slices_and_cost_nothing_afterwards(tmp_path, bus):
    bus.on("after_train_iter", lambda event: gc.collect(), before=4)
    before = list(gc.callbacks)
    picture = traced(tmp_path, bus=bus, first=1, iterations=2)
    assert [one.name for one in picture.track("training")].count("garbage collection, generation 2") >= 2
    assert gc.callbacks == before


def test_a_window_that_is_never_reached_is_a_warning(tmp_path, caplog, capsys):
    make_loop(TraceHook(first=8), work_dir=tmp_path).run()
    assert not (tmp_path / FILE).exists()
    assert "no trace was made" in capsys.readouterr().err


def test_a_stop_or_an_exception_in_the_window_leaves_a_trace_of_whole_iterations(tmp_path):
    bus = Bus()
    bus.on("after_train_iter", lambda event: event.run.stop(), after=3)
    assert traced(tmp_path / "stop", bus=bus, first=2, iterations=100).iterations == [2, 3]
    bus = Bus()
    bus.on("after_train_iter", fails(ValueError("broken")), once=5)
    with pytest.raises(ValueError, match="broken"):
        traced(tmp_path / "error", bus=bus, first=2, iterations=100)
    picture = Picture(tmp_path / "error" / FILE)
    picture.check()
    assert picture.iterations == [2, 3]


def test_a_killed_run_leaves_no_half_file(tmp_path, script):
    done = script(
        f"""
        import os
        from tests.hooks.conftest import make_loop
        from trainbus.eventloop import Bus
        from trainbus.observe import TraceHook
        bus = Bus()
        bus.on("after_train_iter", lambda event: os.kill(os.getpid(), 9), once=6)
        make_loop(TraceHook(first=1, iterations=100), bus=bus, work_dir={str(tmp_path / "run")!r}).run()
        """
    )
    assert done.returncode == -9, done.stderr
    assert not [path for path in (tmp_path / "run").rglob("*") if "trace" in path.name]


def test_each_training_of_a_run_that_trains_again_has_its_window(tmp_path):
    bus = Bus(TraceHook(first=1, iterations=2))
    make_loop(work_dir=tmp_path, bus=bus).run()
    make_loop(work_dir=tmp_path, bus=bus, max_epochs=1).run()
    assert Picture(tmp_path / FILE).iterations == [1, 2]


def test_a_disk_that_refuses_is_logged_and_the_training_continues(tmp_path, capsys):
    loop = make_loop(TraceHook(first=1, iterations=2), work_dir=tmp_path)
    loop.bus.on("before_run", lambda event: (tmp_path / FILE).mkdir())
    loop.run()
    assert loop.counters.iter == 8
    assert "the trace could not be written" in capsys.readouterr().err


def test_without_a_work_dir_or_on_a_bus_that_must_not_measure_it_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="work_dir="):
        make_loop(TraceHook()).run()
    bus = Bus(TraceHook())
    bus.timing = False
    with pytest.raises(ConfigurationError, match=r"bus\.timing"):
        make_loop(work_dir=tmp_path, bus=bus).run()
