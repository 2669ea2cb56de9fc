import gc
import threading
import time
import tracemalloc

import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, BusStateError, Hook, Run
from trainbus.eventloop.events import AfterTrainIter, Event
from trainbus.eventloop.measure import spans
from trainbus.hooks import CheckpointHook, OptimizerHook
from trainbus.observe import Costs, LaneCosts, Part, bus_recorder

from ..hooks.conftest import StopAfter, batches, loss_of, make_loop, small_model
from ..waiting import meanwhile


@pytest.fixture
def bus() -> Bus:
    return Bus(timing=True)


def slow(event):
    time.sleep(0.001)


def check(costs: Costs) -> dict[str, Part]:
    """The parts add up to the wall time, and none is negative. Return them by name."""
    assert sum(part.seconds for part in costs.parts) == pytest.approx(costs.wall, rel=1e-6)
    assert sum(part.share for part in costs.parts) == pytest.approx(1, rel=1e-6)
    assert all(part.seconds >= 0 for part in costs.parts)
    assert costs.parts == sorted(costs.parts, key=lambda part: -part.seconds)
    assert costs.dropped == 0
    return {f"{part.name} {part.mount_point}".strip(): part for part in costs.parts}


def test_subscriptions_that_come_and_go_leave_little_behind(bus):
    def come_and_go(times: int) -> None:
        for _ in range(times):
            with bus.on("after_train_iter", lambda event: None):
                bus.publish(AfterTrainIter(progress=None))
        bus.internal.recorder.drain()

    come_and_go(100)
    tracemalloc.start()
    try:
        come_and_go(200)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200 * 2500  # bytes; with a histogram of fixed size for each it would be 4700


def test_the_parts_add_up_to_the_wall_time_and_name_the_hook(bus):
    with pytest.raises(BusStateError, match=r"Bus\(timing=True\)"):
        Bus().costs()
    bus.on("after_train_iter", slow)
    bus.publish(AfterTrainIter(progress=None))
    assert bus.costs().wall == 0  # of no run
    loop = make_loop(OptimizerHook(accumulate=2), bus=bus, val_data=batches(2), test_data=batches(2))
    loop.run()
    costs = bus.costs()
    parts = check(costs)
    assert {"step", "waiting for data", "forward", "backward", "optimizer step", "validation", "between epochs"} <= parts.keys()
    part = parts["slow after_train_iter"]
    assert part.group == "hook"
    assert part.calls == 8
    assert part.mean >= 0.001
    assert part.p99 >= part.mean * 0.9
    assert part.seconds >= 8 * 0.001
    assert costs.steps.total == 8
    assert costs.memory > 0
    time.sleep(0.05)  # between two runs
    began = time.perf_counter()
    loop.test()
    assert check(bus.costs())["test"].seconds > 0
    assert costs.wall < bus.costs().wall <= costs.wall + time.perf_counter() - began


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize(
    "options", [{"max_iters": 6, "val_interval": 2}, {"max_epochs": 2, "val_interval": 2}, {"max_epochs": 2}]
)
def test_validations_are_a_part_however_they_are_counted_also_when_a_stop_cuts_them_short(bus, options, stops):
    bus.on("after_val_iter", slow)
    if stops:
        bus.on("after_val_iter", lambda event: event.run.stop())
    bus.on("after_train", lambda event: time.sleep(0.02))
    make_loop(bus=bus, val_data=batches(2), **options).run()
    parts = check(bus.costs())
    assert parts["validation"].seconds > 0
    assert parts["slow after_val_iter"].group == "hook"


def test_a_resumed_run_adds_up(bus, tmp_path):
    make_loop(CheckpointHook(interval=1), StopAfter(6), work_dir=tmp_path).run()
    make_loop(CheckpointHook(interval=1), bus=bus, work_dir=tmp_path).run(resume="auto")
    parts = check(costs := bus.costs())
    assert costs.steps.total == 2
    assert parts["copying for checkpoints"].seconds > 0
    assert parts["waiting for checkpoints"].seconds > 0


@pytest.mark.parametrize("where", ["step", "after_train_iter"])
def test_a_run_that_fails_adds_up_to_its_exception(bus, where):
    def broken(*_):
        time.sleep(0.01)
        raise ValueError("mine")

    if where == "after_train_iter":
        bus.on(where, broken)
    loop = make_loop(bus=bus, **{"step": broken} if where == "step" else {})
    with pytest.raises(ValueError, match="mine"):
        loop.run()
    check(costs := bus.costs())
    assert costs.wall >= 0.01
    make_loop(bus=Bus(timing=True)).run()


def test_your_own_loop_whose_rounds_are_left_by_break_adds_up(bus):
    bus.on("after_train_iter", slow)
    bus.on("after_train", lambda event: time.sleep(0.02))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(bus, model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(2):
            for index, batch in enumerate(run.train(batches(5))):
                if index == 3:
                    break
                loss = loss_of(run.model, batch)
                loss.backward()
                optimizer.step()
                run.report(loss=loss)
            for batch in run.validate(batches(2)):
                loss_of(run.model, batch)
                if epoch == 1:
                    break
    parts = check(costs := bus.costs())
    assert costs.steps.total == 6
    assert parts["slow after_train_iter"].calls == 6
    assert 0 < parts["validation"].seconds < costs.wall / 2


class InnerOfCostTests(Event):
    """An event that handlers publish."""


def test_nested_and_foreign_publishes_add_up(bus, registry):
    def inner(event):
        time.sleep(0.001)

    def outer(event):
        for _ in range(3):
            bus.publish(InnerOfCostTests())

    bus.on(InnerOfCostTests, inner)
    bus.on("after_train_iter", outer)
    with meanwhile(lambda: bus.publish(InnerOfCostTests())):
        make_loop(bus=bus).run()
    parts = check(costs := bus.costs())
    assert parts["inner inner_of_cost_tests"].calls == 24
    assert 24 * 0.001 <= parts["inner inner_of_cost_tests"].seconds <= costs.wall  # those of the training's own thread
    own = parts["outer after_train_iter"]
    assert own.calls * own.mean == pytest.approx(own.seconds)  # both without the calls within it
    assert own.seconds + parts["inner inner_of_cost_tests"].seconds <= costs.wall


def test_runs_on_two_threads_one_after_the_other_add_up(bus):
    bus.on("after_train_iter", slow)

    def train() -> None:
        with Run(bus, model=small_model()) as run:
            for _ in run.epochs(2):
                for batch in run.train(batches(4)):
                    run.report(loss=loss_of(run.model, batch))

    with bus:
        for thread in [threading.Thread(target=train) for _ in range(2)]:
            thread.start()
            thread.join()
    parts = check(costs := bus.costs())
    assert costs.steps.total == 16
    assert parts["slow after_train_iter"].seconds >= 16 * 0.001


@pytest.mark.long
def test_costs_read_from_another_thread_add_up_at_every_moment(bus):
    bus.on("after_train_iter", lambda event: None)
    wrong: list[AssertionError] = []

    def look() -> None:
        try:
            if (costs := bus.costs()).wall:
                check(costs)
        except AssertionError as error:
            wrong.append(error)

    with meanwhile(look):
        make_loop(bus=bus, max_epochs=20).run()
    assert not wrong


def test_timing_may_begin_and_end_in_the_middle_of_a_run():
    bus = Bus()

    class Switch(Hook):
        def after_train_iter(self, event):
            bus.timing = event.progress.iter in (1, 2, 5) or event.progress.iter > 10
            if bus.timing:
                bus.costs()

    make_loop(Switch(), bus=bus, max_iters=8).run()
    assert not bus.timing
    make_loop(bus=bus, max_iters=13).run()  # counted from the next run on
    assert bus.costs().wall == 0
    bus.off(bus.hooks[0])
    make_loop(bus=bus, max_iters=2).run()
    check(costs := bus.costs())
    assert costs.steps.total == 2


def test_nothing_is_recorded_while_timing_is_off():
    bus = Bus()
    bus.on("after_train_iter", slow)
    bus.on("after_train_iter", slow, offload="thread")
    mount_points = ("after_train_iter", "before_train_iter", "before_forward")
    before = [bus.explain(name) for name in mount_points]
    bus.timing = True
    assert [bus.explain(name) for name in mount_points] != before
    bus.timing = False
    assert [bus.explain(name) for name in mount_points] == before
    assert not bus.wants("before_forward")
    assert all(one.lane is None or one.lane.meter is None for one in bus.subscriptions)


def test_a_hook_can_ask_for_timing():
    class Asks(Hook):
        timing = True

        def after_run(self, event): ...

    assert Bus(Asks()).timing


def test_a_block_of_yours_is_a_part(bus):
    def step(model, batch):
        with bus.span("augmenting"):
            time.sleep(0.001)
        return loss_of(model, batch)

    make_loop(bus=bus, step=step).run()
    part = check(bus.costs())["augmenting"]
    assert part.calls == 8
    assert part.seconds >= 0.008
    bus.timing = False
    with bus.span("augmenting"):
        pass


def test_costs_measured_tells_them_while_the_run_goes_on_also_after_an_error_of_a_handler(bus, change):
    change(spans.PERIOD, 0.0)
    change(bus_recorder.PUBLISH_EVERY, 0.0)
    heard = []

    @bus.on("costs_measured")
    def broken(event):
        heard.append(event)
        raise ValueError

    @bus.on("after_train_iter")
    def stop(event):
        time.sleep(0.01)
        if len(heard) >= 2:
            event.run.stop()

    with capture_logs() as logs:
        make_loop(bus=bus, max_iters=100_000).run()
    assert check(heard[0].costs)["forward"].seconds > 0
    assert len([line for line in logs if line.get("id") == "span-reader-failed"]) == 1


def test_the_table_fits_80_columns_and_sums_up_what_is_small():
    parts = [
        Part("hook", "OptimizerHook.after_train_iter", 100, 6.0, 0.6, 0.07, "after_train_iter"),
        Part("training", "step", 0, 3.98, 0.398),
        Part("hand-off", "AVeryLongNameOfAHook.write_all", 9, 0.01, 0.001, 0.001, "after_save_checkpoint"),
        *[Part("hook", f"Small.number_{number}", 1, 0.001, 0.0001, 0.001, "after_run") for number in range(10)],
    ]
    lane = LaneCosts("LoggerHook.write", ["log_record"], 1_000_000, 0, 123_456, 0, 12345.678, 1234.5, 1000.0, 1024, 0.5, 12.5)
    text = str(Costs(10.0, parts, lanes=[lane], dropped=3))
    assert max(map(len, text.splitlines())) <= 80
    assert "OptimizerHook, after_train_iter " in text
    assert "10 others" in text
    assert "number_" not in text
    assert "LoggerHook.write" in text
    assert "3 spans were lost" in text
    assert "\x1b" not in text
    assert "Offloaded" not in str(Costs(10.0, parts))


def test_a_name_that_does_not_fit_beside_its_figures_stands_whole_above_them():
    name = "AHookWithALongName.writes_it_all_to_the_database"
    part = Part("hook", name, 680, 1.0, 1.0, 0.001, "after_train_iter")
    lane = LaneCosts(name, ["after_train_iter"], 680, 0, 0, 0, 0.678, 0.5, 1000.0, 1024, 0.5, 12.5)
    short = LaneCosts("CheckInvalidLossHook.after_train_iter", ["after_train_iter"], 1, 0, 0, 0)
    assert "\nCheckInvalidLossHook " in str(Costs(1.0, [], lanes=[short]))  # the mount point is not repeated
    lines = str(Costs(1.0, [part], lanes=[lane])).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[lines.index(f"{name}, after_train_iter") + 1].split() == ["100.0%", "1.000", "680", "1.471", "1.000"]
    assert lines[lines.index(name) + 1].split() == ["680", "0", "0.678", "1.00", "0.500", "1000", "1024", "500", "12500"]
