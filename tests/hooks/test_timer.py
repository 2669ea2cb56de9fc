import time
from functools import partial

import pytest
from structlog.testing import capture_logs

from trainbus.eventloop import Bus
from trainbus.eventloop.seams import CLOCK
from trainbus.hooks import IterTimerHook, LoggerHook, Writer

from . import conftest

DATA = conftest.batches(3)
step = conftest.loss_of
make_loop = partial(conftest.make_loop, train_data=DATA)


@pytest.fixture
def bus():
    return Bus(IterTimerHook())


class Unknown:
    """A loader without a length, which takes its time for each batch."""

    def __init__(self, wait=lambda: None):
        self.wait = wait

    def __iter__(self):
        for batch in DATA:
            self.wait()
            yield batch


class Slow(Unknown):
    """One with a length."""

    def __len__(self):
        return len(DATA)


def outputs_of(bus):
    found = []
    bus.on("after_train_iter", lambda event: found.append(dict(event.outputs)), priority=90)
    return found


def test_every_training_iteration_reports_its_times_and_the_mean_times_the_iterations_left(bus):
    found, infos = outputs_of(bus), []
    bus.on("after_train_iter", lambda event: infos.append(dict(event.run.info)), priority=90)
    make_loop(bus=bus).run()
    assert len(found) == 6
    for index, (outputs, info) in enumerate(zip(found, infos, strict=True)):
        mean = sum(entry["time"] for entry in found[: index + 1]) / (index + 1)
        assert 0 <= outputs["data_time"] <= outputs["time"]
        assert outputs["eta"] == pytest.approx(mean * (6 - index - 1))
        for name, full in (("eta", "eta"), ("time", "train/time"), ("data_time", "train/data_time")):
            assert info[full] == outputs[name]


def test_waiting_for_the_data_is_data_time_and_without_a_length_there_is_no_eta(bus):
    found = outputs_of(bus)
    make_loop(bus=bus, train_data=Unknown(lambda: time.sleep(0.02))).run()
    assert len(found) == 6
    assert all(outputs["time"] >= outputs["data_time"] >= 0.02 for outputs in found)
    assert not any("eta" in outputs for outputs in found)


def test_a_validation_within_an_epoch_is_not_in_the_iteration_time(bus):
    found = outputs_of(bus)
    slow = {"val_data": DATA[:1], "val_step": lambda model, batch: time.sleep(0.05) or {}}
    make_loop(bus=bus, max_iters=4, val_interval=1, **slow).run()
    assert len(found) == 4
    # The validation before each of these took more than this, and a step takes well below a millisecond.
    assert sum(outputs["data_time"] for outputs in found[1:]) < 3 * 0.05


@pytest.mark.parametrize("stage", ["val", "test"])
def test_validation_and_test_have_separate_times_which_are_no_metrics(bus, stage):
    infos = []
    bus.on(f"after_{stage}_iter", lambda event: infos.append(dict(event.run.info)), priority=90)
    loop = make_loop(bus=bus, val_data=DATA, test_data=DATA)
    assert set((loop.validate if stage == "val" else loop.test)()) == {"loss"}
    assert len(infos) == 3
    assert all(0 <= info[f"{stage}/data_time"] <= info[f"{stage}/time"] for info in infos)
    assert infos[0][f"{stage}/eta"] == pytest.approx(2 * infos[0][f"{stage}/time"])
    assert infos[-1][f"{stage}/eta"] == 0.0


def test_a_resumed_run_keeps_the_count_but_not_the_mean(bus, tmp_path):
    loop = make_loop(bus=bus, work_dir=tmp_path)
    bus.on("after_train_iter", lambda _: loop.save(), once=4)
    loop.run()

    timer, before = IterTimerHook(), []
    second = Bus(timer)
    second.on("before_train", lambda _: before.append((timer.iters, timer.seconds)))
    found = outputs_of(second)
    make_loop(bus=second, work_dir=tmp_path).run(resume="auto")
    assert before[0][0] == 4
    assert before[0][1] > 0
    assert timer.iters == 6
    assert len(found) == 2
    assert found[0]["eta"] == pytest.approx(found[0]["time"])


@pytest.fixture
def passes(change):
    """A function that lets so many seconds pass, on a clock that stands still otherwise."""
    now = [100.0]

    def let_pass(seconds):
        now[0] += seconds

    change(CLOCK, lambda: now[0])
    return let_pass


def summary_of(bus, **job):
    """Run a job; return what the run's information says at its end, and the line of the summary."""
    infos = []
    bus.on("after_run", lambda event: infos.append(dict(event.run.info)))
    with capture_logs() as logs:
        make_loop(bus=bus, **job).run()
    (summary,) = [entry for entry in logs if entry["event"] == "training took"]
    return infos[0], summary


def test_the_summary_shows_the_parts_of_the_time(bus, passes):
    bus.on("before_train_iter", lambda event: passes(2.0), priority=80)
    bus.on("after_train_iter", lambda event: passes(3.0), priority=40)
    bus.on("before_val", lambda event: passes(50.0))
    data = {"train_data": Slow(lambda: passes(1.0)), "val_data": DATA[:1], "val_step": step}
    info, summary = summary_of(bus, step=lambda model, batch: passes(4.0) or step(model, batch), **data)
    assert info["train/mean_time"] == 10.0
    assert info["train/data_share"] == pytest.approx(0.1)
    assert info["train/hooks_share"] == pytest.approx(0.5)
    times = {"total": "0:02:40", "validation": "0:01:40", "seconds_per_iter": 10.0, "data": "10.0%", "hooks": "50.0%"}
    assert summary == {"event": "training took", "log_level": "info", "iters": 6} | times


def test_hooks_after_the_timer_count_as_hooks_too(bus, passes):
    bus.on("after_train_iter", lambda event: passes(3.0), priority=90)
    info, _ = summary_of(bus, step=lambda model, batch: passes(1.0) or step(model, batch), max_iters=5)
    assert info["train/hooks_share"] == pytest.approx(15 / 20)


def test_time_between_epochs_is_split_into_hooks_and_validations(bus, passes):
    bus.on("before_train", lambda event: passes(1.0), priority=60)
    bus.on("after_train_epoch", lambda event: passes(10.0))
    bus.on("after_val", lambda event: passes(4.0), priority=60)
    bus.on("before_val_iter", lambda event: passes(7.0))
    data = {"val_data": DATA[:1], "val_step": step}
    info, summary = summary_of(bus, step=lambda model, batch: passes(1.0) or step(model, batch), **data)
    assert info["train/mean_time"] == 1.0
    assert info["train/hooks_share"] == pytest.approx(29 / 35)
    assert (summary["total"], summary["validation"], summary["hooks"]) == ("0:00:49", "0:00:14", "82.9%")


def test_the_summary_comes_after_the_last_line_of_the_logger(logs):
    written = []

    class Slow(Writer):
        def write_scalars(self, scalars, step, where):
            written.append((where.stage, step, list(logs)))

    bus = Bus(LoggerHook(writers=[Slow(interval=1)]), IterTimerHook())
    make_loop(bus=bus, val_data=DATA[:1], val_step=step).run()
    assert [(stage, step) for stage, step, _ in written][-1] == ("val", 2)
    assert all(before == [] for _, _, before in written)
    assert [entry["event"] for entry in logs] == ["training took"]


def test_warmup_iterations_are_not_in_the_summary(passes):
    timer = IterTimerHook(warmup_iter=2)
    info, _ = summary_of(Bus(timer), step=lambda *given: passes(9.0 if timer.iters < 2 else 1.0) or step(*given))
    assert info["train/mean_time"] == 1.0
    assert timer.seconds == 22.0


def test_fewer_iterations_than_the_warmup_have_a_total_only():
    _, summary = summary_of(Bus(IterTimerHook(warmup_iter=50)))
    assert summary["iters"] == 6
    assert "seconds_per_iter" not in summary
