import json
import random
import signal
import textwrap
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.hooks import (
    CheckpointHook,
    ConsoleWriter,
    CSVWriter,
    IterTimerHook,
    JSONLinesWriter,
    LoggerHook,
    RuntimeInfoHook,
    Writer,
)
from trainbus.hooks.writers import target
from trainbus.observe import RunRecordHook

from ..failing import fails
from . import conftest
from .writers.readers import text

DATA = conftest.batches(7)
make_loop = partial(conftest.make_loop, train_data=DATA)


class Notes(Writer):
    """Writes down what it is asked to do, in order."""

    def __init__(self, interval=None):
        super().__init__(interval)
        self.calls = []
        self.threads = set()

    def note(self, *what):
        self.calls.append(what)
        self.threads.add(threading.current_thread())

    def open(self, run):
        self.note("open", run)

    def write_scalars(self, scalars, step, where):
        self.note("scalars", dict(scalars), step, where)

    def write_config(self, config):
        self.note("config", config)

    def write_text(self, name, text, where):
        self.note("text", name, text, where.iter)

    def flush(self):
        self.note("flush")

    def close(self):
        self.note("close")

    @property
    def names(self):
        return [call[0] for call in self.calls if call[0] != "flush"]

    def scalars(self, stage="train"):
        return [call[1:] for call in self.calls if call[0] == "scalars" and call[3].stage == stage]

    def steps(self, stage="train"):
        return [step for _, step, _ in self.scalars(stage)]


def counting(losses=None):
    """A step that counts its calls."""
    calls = iter(range(10_000)) if losses is None else iter(losses)

    def step(model, batch):
        return {"loss": model(batch[0]).mean() * 0 + next(calls)}

    return step


@pytest.fixture
def notes():
    return Notes()


def bus_with(*writers, **options):
    return Bus(LoggerHook(writers=writers, **options))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"interval": 3}, [3, 6, 10, 13]),  # multiples within the epoch
        ({"interval": 3, "ignore_last": False}, [3, 6, 7, 10, 13, 14]),
        ({}, [7, 14]),  # an epoch no longer than the interval
        ({"interval": 7, "ignore_last": False}, [7, 14]),  # no line twice
    ],
)
def test_training_lines_are_written_at_multiples_of_the_interval(notes, options, steps):
    make_loop(bus=bus_with(notes, **options)).run()
    assert notes.steps() == steps


def test_a_line_has_the_position_and_means_over_the_window_and_a_writer_of_every_iteration_raw_values(notes):
    every = Notes(interval=1)
    make_loop(bus=bus_with(notes, every, interval=7, window_size=2), step=counting()).run()
    assert [scalars["train/loss"] for scalars, _, _ in notes.scalars()] == [5.5, 12.5]
    where = notes.scalars()[1][2]
    assert (where.epoch, where.iter, where.batch, where.epoch_length, where.max_epochs) == (2, 14, 7, 7, 2)
    assert [scalars["train/loss"] for scalars, _, _ in every.scalars()] == list(range(14))


def test_a_tensor_or_array_of_one_element_is_a_scalar(notes):
    def step(model, batch):
        loss = model(batch[0]).mean()
        one = {"tensor": torch.full((1, 1), 0.5), "param": model.bias, "array": np.array([0.25]), "number": np.float32(2)}
        return {"loss": loss, **one, "none": torch.zeros(0), "many": np.zeros(2)}

    model = torch.nn.Linear(3, 1)
    make_loop(bus=bus_with(notes, interval=7), model=model, step=step, val_data=DATA[:2], val_step=step).run()
    names = {name for scalars, _, _ in notes.scalars() for name in scalars}
    assert names == {f"train/{name}" for name in ("loss", "tensor", "param", "array", "number")}
    for stage in ("train", "val"):
        (scalars, _, _), _ = notes.scalars(stage)
        assert [scalars[f"{stage}/{name}"] for name in ("tensor", "array", "number")] == [0.5, 0.25, 2.0]


def test_targets_of_a_last_batch_of_one_are_not_scalars(notes):
    def step(model, batch):
        return {"loss": model(batch).mean(), "target": batch[:, 0], "array": batch[:, 0].numpy()}

    data = [torch.ones(2, 3), torch.ones(1, 3)]
    model = torch.nn.Linear(3, 1)
    make_loop(bus=bus_with(notes, interval=1), model=model, step=step, train_data=data, val_data=data, val_step=step).run()
    assert {name for scalars, _, _ in notes.scalars() for name in scalars} == {"train/loss"}
    assert {name for scalars, _, _ in notes.scalars("val") for name in scalars} == {"val/loss"}


@pytest.mark.parametrize(
    ("options", "job", "steps"),
    [
        ({}, {}, [1, 2]),
        ({"log_metric_by_epoch": False}, {}, [7, 14]),
        ({}, {"max_iters": 10, "val_interval": 5}, [5, 10]),
        ({}, {"val_step": lambda model, batch: {}}, []),  # without metrics
    ],
)
def test_the_step_of_metrics_is_the_number_of_epochs_or_of_iterations(notes, options, job, steps):
    make_loop(bus=bus_with(notes, **options), val_data=DATA[:2], **job).run()
    assert notes.scalars()
    assert notes.steps("val") == steps
    assert [set(scalars) for scalars, _, _ in notes.scalars("val")] == [{"val/loss"}] * len(steps)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_without_training_the_step_is_0(notes, stage):
    loop = make_loop(bus=bus_with(notes), val_data=DATA[:2], test_data=DATA[:2])
    (loop.validate if stage == "val" else loop.test)()
    assert notes.steps(stage) == [0]


def test_the_line_of_a_validation_includes_its_times(notes):
    bus = bus_with(notes)
    bus.add(IterTimerHook())
    make_loop(bus=bus, val_data=DATA[:2]).run()
    assert set(notes.scalars("val")[0][0]) == {"val/loss", "val/time", "val/data_time"}
    assert {"train/loss", "train/time", "train/data_time", "train/eta"} == set(notes.scalars()[0][0])


def test_a_writer_is_called_in_the_order_of_each_run_from_one_thread(notes, tmp_path):
    data = {"val_data": DATA[:1], "test_data": DATA[:1], "config": {"lr": 0.1, "model": DATA}}
    loop = make_loop(bus=bus_with(notes, interval=7), work_dir=tmp_path, name="digits", seed=3, **data)
    loop.run()
    once = ["scalars", "scalars"]
    assert notes.names == ["open", "config", *once, *once, "close"]
    assert [call[0] for call in notes.calls[-2:]] == ["flush", "close"]
    assert [call[3].stage for call in notes.calls if call[0] == "scalars"] == ["train", "val", "train", "val"]
    assert len(notes.threads) == 1
    assert notes.threads != {threading.current_thread()}
    run = notes.calls[0][1]
    assert (run.name, run.work_dir, run.seed, run.config["lr"]) == ("digits", tmp_path, 3, 0.1)
    notes.calls.clear()
    loop.test()
    assert notes.names == ["open", "config", "scalars", "close"]


def test_the_console_shows_no_line_with_the_experiments_name_alone(capsys):
    make_loop(bus=bus_with(ConsoleWriter(), interval=5, interval_exp_name=1), name="digits").run()
    out = capsys.readouterr()
    assert "loss" in out.out + out.err
    assert "experiment" not in out.out + out.err


def test_the_experiment_name_is_written_at_its_interval(notes):
    make_loop(bus=bus_with(notes, interval_exp_name=5), name="digits").run()
    texts = [call[1:] for call in notes.calls if call[0] == "text"]
    assert texts == [("experiment", "digits", 5), ("experiment", "digits", 10)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_closes_the_writers_after_the_last_line(notes, error):
    bus = bus_with(notes, interval=1)

    bus.on("after_train_iter", fails(error), once=3, priority=90)
    with pytest.raises(error):
        make_loop(bus=bus).run()
    assert notes.steps() == [1, 2, 3]
    assert notes.names[-1] == "close"


def test_training_does_not_wait_for_a_slow_writer(notes):
    slow = Held(interval=1)  # until all of the training is over
    bus = bus_with(slow)
    bus.on("after_train", lambda event: slow.free.set())
    make_loop(bus=bus, max_epochs=50, step=counting()).run()
    assert slow.steps() == list(range(1, 351))


@pytest.mark.long
def test_a_hanging_writer_blocks_training_only_until_it_is_retired(logs):
    free, bus = threading.Event(), Bus()

    class Hangs(Notes):
        def write_scalars(self, scalars, step, where):
            free.wait()

    logger = LoggerHook(writers=[Hangs(interval=1)])
    logger.timeout = 0.1
    bus.add(logger)
    loop = make_loop(bus=bus, max_epochs=300, step=counting())
    loop.run()  # of more iterations than there are places in the lane
    free.set()
    assert loop.counters.iter == 2100
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["a handler failed"] * 3 + ["handler retired"]


@pytest.mark.long
def test_a_writer_that_continues_after_a_timeout_loses_nothing(logs):
    class HangsOnce(Notes):
        def write_scalars(self, scalars, step, where):
            while not [entry for entry in logs if "took longer than its timeout" in str(entry.get("exc_info"))]:
                time.sleep(0.01)
            super().write_scalars(scalars, step, where)

    writer, bus = HangsOnce(interval=1), Bus()
    logger = LoggerHook(writers=[writer])
    logger.timeout = 1.0
    bus.add(logger)
    make_loop(bus=bus, max_epochs=100, step=counting()).run()
    assert writer.steps() == list(range(1, 701))
    assert writer.names[-1] == "close"


class OutOfOrder(Notes):
    """Writes down what it is given when it is flushed. Fails where ``broken(call, step)`` is true; a flush then forgets all."""

    def __init__(self, broken):
        super().__init__(interval=1)
        self.broken = broken
        self.taken = []

    def open(self, run):
        super().open(run)
        self.taken.clear()

    def write_scalars(self, scalars, step, where):
        if self.broken("write", step):
            raise OSError("no space left on device")
        self.taken.append((scalars, step, where))

    def flush(self):
        taken, self.taken = self.taken, []
        if taken and self.broken("flush", taken[-1][1]):
            raise OSError("no space left on device")
        for entry in taken:
            super().write_scalars(*entry)


@pytest.mark.parametrize("broken", ["write", "flush"])
def test_a_failing_writer_is_retried_and_loses_nothing(broken, logs):
    trained = threading.Event()
    writer = OutOfOrder(lambda call, step: call == broken and step > 50 and not trained.is_set())
    bus = bus_with(writer)
    bus.on("after_train", lambda event: (bus.drain(), trained.set()))
    make_loop(bus=bus, max_epochs=20, step=counting()).run()
    assert sorted(set(writer.steps())) == list(range(1, 141))
    assert writer.names[-1] == "close"
    assert {entry["event"] for entry in logs} == {"a writer failed and will be tried again", "a writer works again"}
    assert all(entry["lost"] == 0 for entry in logs)


def test_a_writer_that_does_not_recover_ends_neither_the_run_nor_other_writers(change, logs):
    """It tells its losses, and keeps a bounded number."""
    change(target.MOST_KEPT, 20)
    writer, other = OutOfOrder(lambda call, step: call == "write"), Notes(interval=1)
    make_loop(bus=bus_with(writer, other), max_epochs=20, step=counting()).run()
    assert writer.steps() == []
    assert other.steps() == list(range(1, 141))
    assert (logs[-1]["event"], logs[-1]["log_level"], logs[-1]["lost"]) == ("a writer has lost data", "error", 140)
    assert all(entry.get("kept", 0) <= 21 for entry in logs)


def test_a_writer_that_cannot_be_opened_at_first_gets_all_data_later(tmp_path, logs):
    (tmp_path / "out").write_text("a file where a folder should be")
    bus = bus_with(JSONLinesWriter("out/scalars.jsonl", interval=1))
    bus.on("after_train", lambda event: (bus.drain(), (tmp_path / "out").unlink()))
    make_loop(bus=bus, work_dir=tmp_path).run()
    assert len((tmp_path / "out" / "scalars.jsonl").read_text().splitlines()) == 14


def test_waiting_calls_do_not_carry_over_to_the_next_run(notes, logs):
    writer = OutOfOrder(lambda call, step: call == "write" and not tests)
    tests = []
    loop = make_loop(bus=bus_with(writer, notes), test_data=DATA[:1])
    loop.run()
    tests.append(1)
    loop.test()
    assert [where.stage for _, _, where in writer.scalars("test")] == ["test"]
    assert writer.steps() == []


@pytest.mark.long
@pytest.mark.parametrize("writer", [JSONLinesWriter, CSVWriter])
def test_lines_of_a_committed_checkpoint_survive_a_kill(script, tmp_path, writer):
    """SIGKILL in the moment of the commit: nothing that the checkpoint has seen is missing, and a resumed run leaves no gap."""
    source = f"""
        import os, signal, torch
        from trainbus.eventloop import Bus, TrainLoop
        from trainbus.hooks import CheckpointHook, ConsoleWriter, CSVWriter, JSONLinesWriter, LoggerHook

        bus = Bus(LoggerHook(writers=[{writer.__name__}(interval=1)]), CheckpointHook(interval=30, by_epoch=False))

        @bus.on("checkpoint_committed")
        def kill(event):
            if "iter_30." in event.path and os.environ.get("STRIKE"):
                os.kill(os.getpid(), signal.SIGKILL)

        model = torch.nn.Linear(1, 1)
        options = {{"train_data": [torch.ones(1, 1)] * 40, "max_epochs": 1, "work_dir": {str(tmp_path)!r}}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = TrainLoop(model, optimizer, step=lambda model, batch: model(batch).mean(), bus=bus, **options)
    """
    run = textwrap.dedent(source)
    assert script(f"import os; os.environ['STRIKE'] = '1'\n{run}\nloop.run()").returncode == -signal.SIGKILL
    assert set(range(1, 31)) <= {step for step, _ in text(tmp_path, "train/loss")}
    assert script(f"{run}\nloop.run(resume='auto')").returncode == 0
    assert {step for step, _ in text(tmp_path, "train/loss")} == set(range(1, 41))


def test_writers_are_synced_before_a_commit_and_a_hanging_one_delays_it_only_briefly(tmp_path):
    class Durable(Notes):
        def sync(self):
            self.note("sync")

    class Hangs(Notes):
        def sync(self):
            committed.wait(20)

    committed, notes = threading.Event(), Durable(interval=1)
    found = []
    bus = Bus(LoggerHook(writers=[notes]), CheckpointHook(interval=1))
    bus.on("checkpoint_committed", lambda event: found.append((event.progress.iter, list(notes.calls))))
    make_loop(bus=bus, work_dir=tmp_path / "good").run()
    assert [iters for iters, _ in found] == [7, 14]
    for iters, calls in found:
        assert ("sync",) in calls
        assert iters in [call[2] for call in calls if call[0] == "scalars"]
    bus = Bus(abort_timeout=0.2)
    bus.add(LoggerHook(writers=[Hangs()]), CheckpointHook(interval=1))
    bus.on("checkpoint_committed", lambda event: committed.set())
    with capture_logs() as logs:
        make_loop(bus=bus, work_dir=tmp_path / "bad").run()
    assert committed.is_set()
    assert "no longer waits" in logs[0]["event"]


@pytest.mark.parametrize(("at", "priority", "steps"), [(3, 90, range(4, 15)), (7, 50, range(8, 15))])
def test_a_logger_added_during_a_run_writes_from_then_on(notes, at, priority, steps):
    """In the last iteration of an epoch: the validation of that epoch, too."""
    bus, logger = Bus(), LoggerHook(interval=1, writers=[notes])
    bus.on("after_train_iter", lambda event: bus.add(logger), once=at, priority=priority)
    make_loop(bus=bus, val_data=DATA).run()
    assert notes.steps() == [*steps]
    assert notes.steps("val") == [1, 2]
    assert (notes.names[0], notes.names[-1]) == ("open", "close")


def test_a_run_that_fails_before_it_begins_opens_no_writer(notes):
    bus = bus_with(notes)
    bus.on("before_run", lambda event: 1 / 0, priority=0)
    with pytest.raises(ZeroDivisionError):
        make_loop(bus=bus).run()
    assert notes.names == []


def test_console_and_json_lines_are_the_default(tmp_path, capsys):
    bus = Bus(LoggerHook(interval=7))
    make_loop(bus=bus, val_data=DATA[:1], work_dir=tmp_path).run()
    printed = capsys.readouterr().out.splitlines()
    places = ["epoch 1/2  iter 7/7", "epoch 1/2  val", "epoch 2/2  iter 7/7", "epoch 2/2  val"]
    assert [line.split("  loss")[0] for line in printed] == places
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [(line["step"], line["iter"]) for line in lines] == [(7, 7), (1, 7), (14, 14), (2, 14)]


class Late(torch.Tensor):
    """A tensor whose number is read only on the logger's thread, as one on a GPU."""


class Held(Notes):
    """A writer that keeps the thread of its logger busy, so that all iterations wait in the lane, until it is freed."""

    def __init__(self, interval=None):
        super().__init__(interval)
        self.free = threading.Event()

    def open(self, run):
        assert self.free.wait(30)
        super().open(run)


def several(as_type):
    """A step with a loss, an accuracy, and a norm that only every third batch reports."""

    def step(model, batch):
        loss = model(batch[0]).square().mean()
        calls = step.calls = step.calls + 1
        outputs = {"loss": loss, "accuracy": loss.detach().as_subclass(as_type) * calls, "count": 2 * calls}
        return outputs | {"norm": loss.item()} if calls % 3 == 0 else outputs

    step.calls = 0
    return step


@pytest.mark.parametrize("several", [(LoggerHook, LoggerHook), (RunRecordHook, RunRecordHook)], ids=["loggers", "records"])
def test_two_hooks_that_write_the_same_file_are_an_error_before_the_training(tmp_path, several):
    loop = make_loop(*(kind() for kind in several), work_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"scalars\.jsonl|run\.json"):
        loop.run()
    assert loop.counters.iter == 0
    own = LoggerHook(writers=[JSONLinesWriter()]), LoggerHook(writers=[JSONLinesWriter("raw.jsonl")])
    make_loop(*own, work_dir=tmp_path / "own").run()
    assert {"scalars.jsonl", "raw.jsonl"} <= {path.name for path in (tmp_path / "own").iterdir()}


@pytest.mark.parametrize("writer", [JSONLinesWriter, CSVWriter])
def test_a_validation_that_resumes_repeat_has_one_line(tmp_path, writer):
    """Each session ends in the second validation, before which the run saved: the next one repeats it."""

    def train(**options):
        bus = Bus(CheckpointHook(1), LoggerHook(100, writers=[writer()]), IterTimerHook())
        loop = make_loop(bus=bus, work_dir=tmp_path, val_data=DATA[:2], seed=0, **options)
        bus.on("after_val", lambda event: event.progress.epoch == 2 and fails(ValueError("killed"))())
        with pytest.raises(ValueError, match="killed"):
            loop.run(resume="auto")

    for _ in range(3):
        train()
    assert [step for step, _ in text(tmp_path, "val/loss")] == [1, 2]
    train(val_step=lambda model, batch: {"loss": 7.0})
    assert text(tmp_path, "val/loss")[2:] == [(2, 7.0)]  # other results are another line


@pytest.mark.long
@pytest.mark.parametrize(("as_type", "held"), [(torch.Tensor, False), (torch.Tensor, True), (Late, True)])
def test_the_lines_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path, as_type, held):
    epoch_mean = {"data_src": "accuracy", "log_name": "mean", "window_size": "epoch"}

    def train(step, *, stop=None, **options):
        torch.manual_seed(0)
        writers, bus = [Held() if stop and held else Notes(), Notes(interval=3)], Bus()
        loggers = LoggerHook(4, writers=writers, ignore_last=False), LoggerHook(5, writers=[Notes()], custom_cfg=[epoch_mean])
        bus.add(*loggers, CheckpointHook(interval=5, by_epoch=False), RuntimeInfoHook())
        if stop:
            bus.on("after_train_iter", lambda event: event.progress.iter + 1 == stop and event.run.stop(), priority=95)
        if stop and held:  # also over the end of an epoch, whose record waits, too
            bus.on("checkpoint_staged", lambda event: event.progress.iter > 6 and writers[0].free.set())
        loop = make_loop(bus=bus, step=step, max_epochs=3, work_dir=tmp_path / ("parts" if options or stop else "whole"))
        loop.run(**options)
        return [one.scalars() for hook in loggers for one in hook._fanout.writers]

    whole = train(several(as_type))
    step = several(as_type)
    before = train(step, stop=10)
    after = train(step, resume="auto")
    assert whole == [one + two for one, two in zip(before, after, strict=True)]


def test_each_value_that_only_some_iterations_report_is_written_with_its_iteration(notes):
    with Run(bus_with(notes), model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(max_iters=25):
            for number in run.train(range(25)):
                run.report(loss=float(number))
                if number % 8 == 0:
                    run.report(val_loss=float(number))
    rows = [(where.batch, scalars.get("train/val_loss")) for scalars, _, where in notes.scalars()]
    assert rows == [(1, 0.0), (9, 8.0), (10, None), (17, 16.0), (20, None), (25, 24.0)]


@pytest.mark.parametrize("seed", range(8))
def test_iterations_that_report_nothing_count_as_those_that_report_other_values(tmp_path, seed):
    """Also where a run goes on in the midst of them."""
    draw, length = random.Random(seed), 40
    intervals = draw.choice([(4, 6), (10,), (7, 25), (100,)])
    reports = {number: float(number) for number in range(2 * length) if draw.random() < draw.choice([0.05, 0.2, 0.5])}
    steps = {number for number in range(2 * length) if draw.random() < 0.5 or number in reports}

    def train(folder, *, also=(), stop=None):
        torch.manual_seed(0)
        writers = [Notes(interval) for interval in intervals]
        custom = [{"data_src": "loss", "log_name": "worst", "method_name": "max", "window_size": "epoch"}]
        logger = LoggerHook(writers=writers, window_size=5, interval_exp_name=30, custom_cfg=custom if seed % 2 else ())
        bus = Bus(logger, CheckpointHook(3, by_epoch=False))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Run(bus, model=model, optimizer=optimizer, work_dir=folder, resume="auto") as run:
            for epoch in run.epochs(2):
                for index in run.train(range(length)):
                    number = epoch * length + index
                    if number in steps:
                        optimizer.step()
                    run.report(**{"loss": reports[number]} if number in reports else {}, **dict.fromkeys(also, 0.5))
                    if number == stop:
                        run.checkpoints.save()
                        run.stop()
        return [
            ({name: value for name, value in scalars.items() if name != "train/other"}, step, where)
            for writer in writers
            for scalars, step, where in writer.scalars()
            if scalars.keys() - {"train/other"}
        ], [call[3] for writer in writers for call in writer.calls if call[0] == "text"]

    whole = train(tmp_path / "whole")
    assert whole == train(tmp_path / "full", also=["other"])
    (before, texts), (after, later) = (train(tmp_path / "parts", stop=draw.randrange(10, 70)), train(tmp_path / "parts"))
    assert sorted(map(repr, whole[0])) == sorted(map(repr, before + after))
    assert sorted(whole[1]) == sorted(texts + later)


@pytest.mark.parametrize(("interval", "kept"), [(1, 0), (20, 14)])
def test_a_save_has_the_iterations_that_a_later_line_depends_on_and_no_other(tmp_path, interval, kept):
    """Also while the writers are being opened, and with an interval longer than the window."""
    writer, bus, saved = Held(), Bus(), []
    bus.add(LoggerHook(interval, writers=[writer]))
    bus.on(
        "before_save_checkpoint", lambda event: saved.append(event.checkpoint["logger_windows"]["0"]["waiting"]), priority=100
    )
    bus.on("after_train_iter", lambda event: event.run.checkpoints.save(), once=14)
    bus.on("checkpoint_staged", lambda event: writer.free.set(), priority=100)
    make_loop(bus=bus, max_epochs=2, work_dir=tmp_path).run()
    assert [*map(len, saved)] == [kept]


def test_files_are_copied_when_the_run_is_over_and_symbolic_links_are_not_followed(tmp_path, logs):
    (tmp_path / "precious").write_text("mine")
    work_dir, copy = tmp_path / "digits", tmp_path / "archive" / "digits"
    copy.mkdir(parents=True)
    (copy / "scalars.jsonl").symlink_to(tmp_path / "precious")
    bus = bus_with(JSONLinesWriter(interval=1), out_dir=tmp_path / "archive")
    make_loop(bus=bus, work_dir=work_dir, config={"lr": 0.1}).run()
    assert {path.name for path in copy.iterdir()} == {"scalars.jsonl", "config.json"}
    assert (copy / "scalars.jsonl").read_text() == (work_dir / "scalars.jsonl").read_text()
    assert len((copy / "scalars.jsonl").read_text().splitlines()) == 14
    assert str(copy / "scalars.jsonl") in [one.get("path") for one in logs]
    assert (tmp_path / "precious").read_text() == "mine"


def test_keep_local_false_deletes_files_of_writers_only_and_appends_later_lines_to_the_copy(tmp_path):
    bus = bus_with(JSONLinesWriter(interval=1), out_dir=tmp_path / "archive", keep_local=False)
    work_dir = tmp_path / "digits"
    loop = make_loop(bus=bus, work_dir=work_dir, val_data=DATA[:1], max_epochs=1)
    loop.run()
    for name in ("weights.safetensors", "train.py", "mine.jsonl"):
        (work_dir / name).write_text("mine")
    loop.validate()
    assert {path.name for path in work_dir.iterdir()} == {"weights.safetensors", "train.py", "mine.jsonl"}
    assert (tmp_path / "archive" / "digits" / "mine.jsonl").read_text() == "mine"
    assert len((tmp_path / "archive" / "digits" / "scalars.jsonl").read_text().splitlines()) == 7 + 1 + 1


def test_files_of_a_failed_run_are_not_copied(tmp_path):
    bus = bus_with(JSONLinesWriter(interval=1), out_dir=tmp_path / "archive", keep_local=False)

    bus.on("after_train_iter", fails(RuntimeError("out of luck")), once=3, priority=90)
    with pytest.raises(RuntimeError):
        make_loop(bus=bus, work_dir=tmp_path / "digits").run()
    assert len((tmp_path / "digits" / "scalars.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "archive").exists()


def test_a_logger_without_writers_copies_files_with_a_matching_suffix_only_and_fails_at_nothing(tmp_path, logs):
    bus = bus_with(out_dir=tmp_path / "archive", out_suffix=".txt")
    work_dir = tmp_path / "digits"
    (work_dir / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.json", "deep/c.txt"):
        (work_dir / name).write_text(name)
    make_loop(bus=bus, work_dir=work_dir, max_epochs=1).run()
    copy = tmp_path / "archive" / "digits"
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*.*")) == ["a.txt", "deep/c.txt"]
    assert [one["log_level"] for one in logs] == ["info"]


def test_a_broken_pipe_does_not_end_the_run(script, tmp_path):
    done = script(
        f"""
        import os, torch
        from trainbus.eventloop import Bus, Run
        from trainbus.hooks.logger import LoggerHook

        reading, writing = os.pipe()
        os.dup2(writing, 1)
        os.close(reading)
        bus = Bus(LoggerHook(interval=1))
        with Run(bus, model=torch.nn.Linear(1, 1), work_dir="{tmp_path}/out") as run:
            for epoch in run.epochs(5):
                for batch in run.train(range(100)):
                    run.report(loss=0.5)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "training continues without lines on it" in done.stderr
    assert len((tmp_path / "out" / "scalars.jsonl").read_text().splitlines()) == 500
