"""The push driver: the same run in three ways (calls, iterators, ``TrainLoop``), and calls out of turn."""

import gc
import inspect
import textwrap
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError
from trainbus.eventloop.errors import RunStopped
from trainbus.eventloop.training import Driver

from ..failing import fails

EPOCHS, ITERS, VAL_EVERY = 2, 5, 2


class Job:
    """One training on a bus of its own: 2 epochs of 3 batches (or 5 iterations), with a validation of 2 batches after each."""

    def __init__(self, parts: Any, work_dir: Any = None, resume: Any = None, by_iter: bool = False) -> None:
        self.parts, self.work_dir, self.resume, self.by_iter = parts, work_dir, resume, by_iter
        self.bus = Bus()
        self.heard: list[Any] = []
        self.trace = parts.Trace(self.bus)
        self.model = parts.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.train, self.val = parts.batches(3), parts.batches(2, seed=2)
        self.limits = {"max_iters": ITERS} if by_iter else {"max_epochs": EPOCHS}

    def run(self) -> Run:
        return Run(self.bus, model=self.model, optimizer=self.optimizer, work_dir=self.work_dir, resume=self.resume)

    def validates_after(self, done: int) -> bool:
        return self.by_iter and (done % VAL_EVERY == 0 or done == ITERS)

    def published(self) -> list[tuple[Any, ...]]:
        """Names, counts and metrics of all events; the writer's thread publishes when it likes, and is left out."""
        events = [one for one in self.trace.events if not one.mount_point.startswith("checkpoint_")]
        return [(one.mount_point, replace(one.progress, run_name=""), getattr(one, "metrics", None)) for one in events]


def by_loop(job: Job) -> None:
    options = {"train_data": job.train, "val_data": job.val, "work_dir": job.work_dir, **job.limits}
    options |= {"val_interval": VAL_EVERY} if job.by_iter else {}
    job.parts.loop(job.bus, model=job.model, optimizer=job.optimizer, **options).run(resume=job.resume)


def by_pull(job: Job) -> None:
    with job.run() as run:
        for _ in run.epochs(**job.limits):
            for batch in run.train(job.train):
                job.parts.learn(run, batch)
            job.parts.evaluate(run, run.validate(job.val))


def by_push(job: Job) -> None:
    """``begin_run()`` and ``end_run()`` end a run that they fail in. Then ``fail()`` does nothing, and hides no error."""
    run = job.run()
    drive = run.drive()
    drive.begin_run()
    try:
        train_by_push(job, run, drive)
        drive.end_run()
    except BaseException as error:
        drive.fail(error)
        raise


def train_by_push(job: Job, run: Run, drive: Driver) -> None:
    if drive.should_stop():
        return
    drive.begin_train(**job.limits)
    if drive.validation_comes_first:
        evaluate_by_push(job, drive)
    for _ in range(run.progress.epoch, 1 if job.by_iter else EPOCHS):
        if drive.should_stop() or not epoch_by_push(job, run, drive):
            break
    drive.end_train()


def epoch_by_push(job: Job, run: Run, drive: Driver) -> bool:
    """Return False if a stop has cut it short."""
    batches = iter(drive.begin_epoch(job.train, endless=job.by_iter))
    last = False
    while not last:
        if drive.should_stop():
            drive.abandon_epoch()
            return False
        batch = next(batches)
        drive.begin_iteration(batch)
        last = drive.last_batch
        job.parts.learn(run, batch)
        drive.end_iteration()
        if job.validates_after(run.progress.iter + 1) and not drive.should_stop():
            evaluate_by_push(job, drive)
    drive.end_epoch()
    if not job.by_iter and not drive.should_stop():
        evaluate_by_push(job, drive)
    return True


def evaluate_by_push(job: Job, drive: Driver, stage: str = "val") -> Any:
    batches = iter(drive.begin_evaluation(stage, job.val))
    while not drive.should_stop():
        batch = next(batches, None)
        if batch is None:
            return drive.end_evaluation()
        drive.begin_evaluation_iteration(batch)
        drive.end_evaluation_iteration({"loss": job.parts.step(job.model, batch)})
    return drive.abandon_evaluation()


WAYS = (by_loop, by_push, by_pull)


def ways(by_iter: bool) -> tuple[Any, ...]:
    """By iterations, the body of a ``for`` statement cannot validate between two of them, as the others do."""
    return WAYS[:2] if by_iter else WAYS


def in_three_ways(parts: Any, prepare: Any, *, error: Any = None, jobs: Any = None, **options: Any) -> list[tuple[Any, ...]]:
    """Return what all three ways have published, after a look whether it is the same, and the same weights."""
    made = jobs or [Job(parts, **options) for _ in ways(options.get("by_iter", False))]
    for way, job in zip(WAYS, made, strict=False):
        prepare(job.bus)
        if error is None:
            way(job)
        else:
            with pytest.raises(error):
                way(job)
        assert job.bus.state == "idle"
        assert job.model.training
    first, *others = made
    assert first.published()
    for other in others:
        assert other.published() == first.published()
        parts.assert_same(dict(other.model.state_dict()), dict(first.model.state_dict()))
    return first.published()


@pytest.mark.parametrize("by_iter", [False, True], ids=["epochs", "iterations"])
def test_a_training_publishes_the_same_events_in_three_ways(parts, by_iter):
    published = in_three_ways(parts, lambda bus: None, by_iter=by_iter)
    names = [name for name, *_ in published]
    assert names.count("after_train_iter") == (5 if by_iter else 6)
    assert names.count("after_val") == (3 if by_iter else 2)


@pytest.mark.parametrize("by_iter", [False, True], ids=["epochs", "iterations"])
@pytest.mark.parametrize(
    ("mount_point", "count"), [("after_train_iter", 2), ("after_train_iter", 4), ("after_train_epoch", 1), ("before_val", 1)]
)
def test_push_pull_and_train_loop_resume_equally(parts, tmp_path, mount_point, count, by_iter):
    first = Job(parts, work_dir=tmp_path / "first", by_iter=by_iter)
    act = lambda event: (event.run.checkpoints.save("here.safetensors"), event.run.stop())  # noqa: E731
    parts.act_at(first.bus, mount_point, count, act)
    by_loop(first)
    (file,) = (tmp_path / "first").glob("here.safetensors")
    jobs = [Job(parts, tmp_path / way.__name__, file, by_iter=by_iter) for way in ways(by_iter)]
    in_three_ways(parts, lambda bus: None, jobs=jobs)
    whole = Job(parts, by_iter=by_iter)
    by_loop(whole)
    parts.assert_same(dict(jobs[1].model.state_dict()), dict(whole.model.state_dict()))


def test_without_data_the_driver_counts_and_pauses_and_the_caller_marks_the_last_batch(parts, tmp_path):
    job = Job(parts, tmp_path)
    job.bus.on("run_paused", lambda event: run.unpause())
    with job.run() as run:
        drive = run.drive()
        drive.begin_train(max_epochs=1)
        assert list(drive.begin_epoch()) == []
        for index in range(2):
            drive.begin_iteration(index, last=index == 1)
            assert run.data.last_batch == (index == 1)
            run.pause()
            drive.end_iteration()
            assert job.trace.names[-2:] == ["run_paused", "run_resumed"]
        run.checkpoints.save()
        drive.begin_iteration()
        drive.end_iteration()
        drive.abandon_epoch()
        assert drive.begin_evaluation("val") == ()
        drive.begin_evaluation_iteration()
        drive.end_evaluation_iteration({"loss": 2.0})
        assert drive.end_evaluation({"accuracy": 0.5}) == {"loss": 2.0, "accuracy": 0.5}
        drive.end_train()
    again = Job(parts, tmp_path, tmp_path / "iter_2.safetensors")
    with again.run() as run:
        drive = run.drive()
        drive.begin_train(max_epochs=1)
        drive.begin_epoch()
        assert (run.progress.iter, run.progress.batch_idx) == (2, 2)
        drive.abandon_epoch()
        drive.begin_epoch()
        assert run.progress.batch_idx == 0
        drive.end_epoch()
        drive.end_train()


def test_calls_that_never_ask_for_a_stop_are_told_so(parts, logs):
    job = Job(parts)
    drive = (run := job.run()).drive()
    drive.begin_run()
    drive.begin_train(max_epochs=1)
    run.stop("enough")
    drive.begin_epoch()
    with pytest.raises(RunStopped):
        drive.begin_iteration()
    assert "stop-not-asked-for" in {entry.get("id") for entry in logs}


def test_the_example_of_the_driver_runs(parts):
    source = textwrap.dedent(inspect.getdoc(Driver).split("\n\n")[1])
    job = Job(parts)
    names = {"Run": Run, "learn": lambda batch: parts.step(job.model, batch), "loader": job.train}
    exec(source, names | vars(job))  # noqa: S102 - ours
    iterations = "3*(before_train_iter after_train_iter)"
    assert job.trace.names == parts.spell(
        f"before_run before_train before_train_epoch {iterations} after_train_epoch after_train after_run"
    )


@pytest.mark.parametrize("outputs", [torch.tensor(0.5), torch.ones(2), 3, [("loss", 1.0)]])
def test_outputs_without_names_are_an_error_that_changes_nothing(parts, trace, bus, outputs):
    def refuses(end):
        before = stand(run, trace)
        with pytest.raises(TrainingError, match=rf"drive\.{end.__name__}\(\).*'loss': loss"):
            end(outputs)
        assert stand(run, trace) == before
        end({"loss": 0.5})

    with Run(bus, model=parts.model()) as run:
        drive = run.drive()
        drive.begin_train()
        drive.begin_epoch()
        drive.begin_iteration()
        refuses(drive.end_iteration)
        for stage in ("val", "test"):
            drive.begin_evaluation(stage)
            drive.begin_evaluation_iteration()
            refuses(drive.end_evaluation_iteration)
            drive.end_evaluation()
        drive.end_epoch()
        drive.end_train()


def test_invalid_options_change_nothing(parts, trace, bus):
    with Run(bus, model=parts.model()) as run:
        drive = run.drive()
        for options, value in (({"max_epochs": 1, "max_iters": 1}, "begin_train"), ({"max_epochs": 0}, "max_epochs=0")):
            with pytest.raises(ConfigurationError, match=value):
                drive.begin_train(**options)
        for stage in ("val", "test"):
            with pytest.raises(ConfigurationError, match="data=3"):
                drive.begin_evaluation(stage, 3)
        for stage in ("train", "validation", None):
            with pytest.raises(ConfigurationError, match=f'stage={stage!r}.*"val" or "test"'):
                drive.begin_evaluation(stage)
    assert trace.names == ["before_run", "after_run"]


def stand(run: Run, trace: Any) -> tuple[Any, ...]:
    return len(trace.events), run.progress, run.state.counters.saved(), run.state.machine.innermost, run.state.version


@pytest.mark.long
def test_fail_ends_an_open_run_although_the_error_has_the_place_in_memory_of_an_earlier_one(parts, bus):
    refuse = bus.on("before_run", fails(ZeroDivisionError))
    drive = Run(bus, model=parts.model()).drive()
    with pytest.raises(ZeroDivisionError) as caught:
        drive.begin_run()
    drive.fail(caught.value)  # does nothing: begin_run() has ended the run
    refuse.cancel()
    place = id(caught.value)
    del caught
    gc.collect()
    drive.begin_run()
    others = []
    while id(error := ZeroDivisionError()) != place and len(others) < 10_000:
        others.append(error)
    drive.fail(error)
    assert bus.state == "idle"


def test_a_step_outside_of_an_iteration_changes_no_count(parts, bus, trace):
    model = parts.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(bus, model=model, optimizer=optimizer) as run:
        drive = run.drive()
        drive.begin_train()
        drive.begin_epoch()
        for _ in range(2):
            drive.begin_iteration()
            optimizer.step()
            drive.end_iteration()
            optimizer.step()
        drive.end_epoch()
        drive.end_train()
    assert [event.progress.update for event in trace.of("after_train_iter")] == [0, 1]
    assert trace.of("after_train_epoch")[0].progress.update == 1
    assert run.progress.update == 2


@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("evaluates", [False, True])
def test_the_end_of_an_epoch_has_the_counts_of_its_last_iteration(parts, bus, trace, iterations, evaluates):
    model = parts.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(bus, model=model, optimizer=optimizer) as run:
        drive = run.drive()
        drive.begin_train()
        drive.begin_epoch()
        for _ in range(iterations):
            drive.begin_iteration()
            optimizer.step()
            optimizer.step()
            drive.end_iteration()
        if evaluates:
            drive.begin_evaluation("test")
            drive.end_evaluation()
        drive.end_epoch()
        drive.end_train()
    last = (trace.of("after_train_iter") or trace.of("before_train_epoch"))[-1]
    assert trace.of("after_train_epoch")[0].progress == last.progress
