"""A run's state in a checkpoint of another program: taken out by a new run, training goes on bit by bit."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.optim.lr_scheduler import MultiStepLR

from trainbus.eventloop import Bus, CheckpointError, ConfigurationError, Event, Run, TrainingError, Update
from trainbus.eventloop.errors import CheckpointValueError
from trainbus.hooks import EMAHook, LoggerHook, ParamSchedulerHook

from ..conftest import learn, model, step
from .jobs import shuffled


class Job:
    """A training in which everything depends on everything: random numbers, the order of the data, hooks' states."""

    def __init__(self, work_dir: Path) -> None:
        self.model = model(3, dropout=0.4)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.ema = EMAHook(momentum=0.2)
        schedule = ParamSchedulerHook(MultiStepLR(optimizer, [4, 7], 0.5), by="iter")
        bus = Bus(self.ema, schedule, LoggerHook(interval=1))
        self.losses: list[float] = []
        bus.on("after_train_iter", lambda event: self.losses.append(event.outputs["loss"].item()))
        self.data, self.val_data = shuffled(), shuffled()
        self.run = Run(bus, model=self.model, optimizer=optimizer, work_dir=work_dir, seed=7)

    def train(self, *, gather: Any = lambda where: None, state: Any = None) -> dict[str, Any]:
        """Three epochs and as many validations in a loop of the user's own; ``gather`` is called wherever it may be."""
        with self.run as run:
            if state is not None:
                run.checkpoints.apply_state(state)
            gather("begun")
            for epoch in run.epochs(3):
                for batch in run.train(self.data):
                    learn(run, batch)
                gather(f"trained {epoch}")
                for index, batch in enumerate(run.validate(self.val_data)):
                    run.report(loss=step(self.model, batch) + torch.rand(()))
                    gather(f"validating {epoch} {index}")
                gather(f"validated {epoch}")
        return self.outcome

    @property
    def outcome(self) -> dict[str, Any]:
        states = {"model": self.model.state_dict(), "optimizer": self.run.optimizers["optimizer"].state_dict()}
        states |= {"averages": dict(self.ema.average.tensors), "random": torch.get_rng_state()}
        return {**states, "counters": self.run.counters.saved(), "losses": self.losses[-3:]}


def drive(run: Run, data: Any, body: Any, *, epochs: int = 3, stop: int | None = None, state: Any = None) -> Any:
    """Train by push; after ``stop`` iterations it ends, and what is gathered there is returned."""
    with run:
        if state is not None:
            run.checkpoints.apply_state(state)
        driver = run.drive()
        driver.begin_train(max_epochs=epochs)
        saved = None
        while run.counters.epoch < epochs and saved is None:
            for batch in driver.begin_epoch(data):
                driver.begin_iteration(batch)
                body(run, batch)
                driver.end_iteration()
                if run.counters.iter == stop:
                    saved = gathered(run)
                    driver.abandon_epoch()
                    break
            else:
                driver.end_epoch()
        driver.end_train()
    return saved


def state_of(run: Run, **others: Any) -> dict[str, Any]:
    """Put its state into a checkpoint of another program, beside ``others``."""
    checkpoint = dict(others)
    run.checkpoints.gather_state(checkpoint)
    return checkpoint


def gathered(run: Run, **others: Any) -> dict[str, Any]:
    """Return such a checkpoint from its file."""
    torch.save(state_of(run, **others), run.work_dir / "host.pt")
    return torch.load(run.work_dir / "host.pt", weights_only=True)


def gathered_at(where: str, work_dir: Path) -> dict[str, Any]:
    """Train, and return what was gathered at one moment."""
    job, found = Job(work_dir), []
    job.train(gather=lambda moment: moment == where and found.append(gathered(job.run, epoch=1, hosts=[1, 2])))
    return found[0]


@pytest.mark.parametrize("where", ["begun", "trained 0", "validating 1 1", "validated 1", "trained 2", "validated 2"])
def test_a_new_run_resumes_bitwise(parts, tmp_path, where):
    whole = Job(tmp_path / "whole").train()
    checkpoint = gathered_at(where, tmp_path / "saving")
    assert (checkpoint["epoch"], checkpoint["hosts"]) == (1, [1, 2])
    rest = Job(tmp_path / "rest").train(state=checkpoint)
    if where in ("trained 2", "validated 2"):  # nothing is left to train
        rest.pop("losses")
        whole.pop("losses")
    parts.assert_same(rest, whole)


@pytest.mark.parametrize("iterations", [1, 5, 6, 8, 17])
def test_a_run_driven_by_push_resumes_between_any_two_iterations(parts, tmp_path, iterations):
    whole, saving, rest = (Job(tmp_path / name) for name in ("whole", "saving", "rest"))
    drive(whole.run, whole.data, learn)
    expected = whole.outcome
    drive(rest.run, rest.data, learn, state=drive(saving.run, saving.data, learn, stop=iterations))
    found = rest.outcome
    if iterations == 17:
        del expected["losses"], found["losses"]
    parts.assert_same(found, expected)


def test_it_is_a_tree_of_tensors_and_plain_values(tmp_path):
    """JSON takes all of it but the tensors, and what it makes of them is the same tree."""
    state = gathered_at("trained 1", tmp_path)["trainbus"]
    tensors = []

    def without_tensors(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return list(value.shape)
        if isinstance(value, dict):
            assert all(type(key) in (str, int) for key in value)
            return {str(key): without_tensors(each) for key, each in value.items()}
        return [without_tensors(each) for each in value] if isinstance(value, list | tuple) else value

    plain = without_tensors(state)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert len(tensors) > 20
    assert {"state_dict", "ema_state_dict", "optimizer", "param_schedulers", "progress", "rng", "data", "bus"} <= plain.keys()
    assert plain["progress"]["iter"] == 12


def test_handlers_of_the_checkpoint_events_add_and_read_their_own_keys(tmp_path, parts):
    bus, seen = Bus(), []
    bus.on("before_save_checkpoint", lambda e: e.checkpoint.update(mine=[1]))
    with Run(bus, model=parts.model(), work_dir=tmp_path) as run:
        checkpoint = state_of(run)
    other = Bus()
    other.on("after_load_checkpoint", lambda e: seen.append((e.path, e.checkpoint["mine"])))
    with Run(other, model=parts.model(), work_dir=tmp_path) as run:
        run.checkpoints.apply_state(checkpoint)
        assert run.checkpoints.resumed_from is None
    assert seen == [("", [1])]
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_before_run_handler_can_apply_a_state_to_a_loop(parts, tmp_path):
    def loop(bus):
        return parts.loop(bus, model=parts.model(dropout=0.3), seed=1, max_epochs=2, work_dir=tmp_path)

    whole = loop(Bus())
    whole.run()
    with loop(Bus())._new_run() as run:
        checkpoint = state_of(run)
    bus, order = Bus(), []
    bus.on("before_run", lambda e: e.run.checkpoints.apply_state(checkpoint), priority=0)
    bus.on("before_run", lambda e: order.append("before_run"), priority=100)
    bus.on("after_load_checkpoint", lambda e: order.append("loaded"))
    rest = loop(bus)
    rest.run()
    assert order == ["before_run", "loaded"]  # every hook is ready
    parts.assert_same(rest.model.state_dict(), whole.model.state_dict())


def test_several_runs_resume_from_one_state_in_memory(parts, tmp_path):
    """The training of the first would change the tensors of the optimizer in place that the second one begins with."""
    state = gathered_at("trained 0", tmp_path)
    first, second = (Job(tmp_path / name).train(state=state) for name in ("first", "second"))
    parts.assert_same(first, second)


def test_a_state_within_an_accumulation_window_has_its_gradients(parts, tmp_path):
    def job(**options: Any) -> Any:
        loop = parts.loop(Bus(Update(accumulate=3)), work_dir=tmp_path, max_epochs=1)
        body = lambda run, batch: run.report(loss=parts.step(loop.model, batch))  # noqa: E731
        return drive(loop._new_run(), parts.batches(8), body, epochs=1, **options), loop.model.state_dict()

    half, _ = job(stop=5)
    assert half["trainbus"]["bus"]["hooks"]["training.update"]["window"]["count"] == 2
    parts.assert_same(job(state=half)[1], job()[1])


# ------------------------------------------------------------------------------------------------------ wrong moments


def test_moments_at_which_no_state_is_gathered_or_applied(parts, tmp_path):
    checkpoint: dict[str, Any] = {}
    run = Run(model=parts.model(), work_dir=tmp_path)
    for _ in range(2):  # before and after it
        with pytest.raises(TrainingError, match=r"run\.checkpoints\.gather_state\(\).*with Run"):
            run.checkpoints.gather_state({})
        with pytest.raises(TrainingError, match="with Run"):
            run.checkpoints.apply_state({})
        with run:
            run.checkpoints.gather_state(checkpoint)
            for _ in run.train([1, 2]):
                with pytest.raises(TrainingError):
                    run.checkpoints.gather_state({})
                with pytest.raises(TrainingError):
                    run.checkpoints.apply_state(checkpoint)
            run.checkpoints.gather_state({})
            with pytest.raises(TrainingError):
                run.checkpoints.apply_state(checkpoint)


@pytest.mark.parametrize(
    "mount_point", ["before_train", "after_train_iter", "after_train_epoch", "after_val_epoch", "after_train"]
)
def test_gathering_state_in_a_handler_is_an_error_with_advice(parts, bus, tmp_path, mount_point):
    bus.on(mount_point, lambda e: e.run.checkpoints.gather_state({}))
    with pytest.raises(TrainingError, match=r"run\.checkpoints\.save\(name\)"):
        parts.loop(bus, work_dir=tmp_path).run()


class TrialAsked(Event):
    """An event of a program that trains in the handler."""


def test_a_handler_of_the_programs_own_event_may_train_and_gather_state(parts, tmp_path):
    program, gathered = Bus(), []

    def train(event: TrialAsked) -> None:
        with Run(model=parts.model(), work_dir=tmp_path) as run:
            list(run.train([1, 2]))
            gathered.append(state_of(run))

    program.on(TrialAsked, train)
    with program:
        program.publish(TrialAsked())
    assert "trainbus" in gathered[0]


@pytest.mark.parametrize(
    ("given", "error", "value"),
    [
        ({"epoch": 1, "model": {}}, CheckpointError, r"'trainbus'.*'epoch', 'model'.*gather_state"),
        ({"trainbus": {"state_dict": {}}}, CheckpointError, "checkpoint"),
        *((given, ConfigurationError, "from_=") for given in (None, [], "host.pt")),
    ],
)
def test_what_is_no_state_of_a_run_is_an_error_naming_its_entries(parts, given, error, value):
    with Run(model=parts.model()) as run, pytest.raises(error, match=value):
        run.checkpoints.apply_state(given)


def test_a_state_of_another_model_is_an_error_unless_strict_is_false(parts):
    with Run(model=torch.nn.Linear(2, 2)) as run:
        checkpoint = state_of(run)
    with pytest.raises(CheckpointError, match="weight"), Run(model=torch.nn.Linear(2, 3)) as run:
        run.checkpoints.apply_state(checkpoint)
    with capture_logs() as logs, Run(model=torch.nn.Linear(2, 3), strict=False) as run:
        run.checkpoints.apply_state(checkpoint)
    assert any("only in part" in entry["event"] for entry in logs)


def test_a_state_that_is_not_plain_is_an_error_with_its_path(parts, tmp_path):
    class Odd:
        def state_dict(self):
            return {"lock": threading.Lock()}

        def load_state_dict(self, state): ...

    checkpoint: dict[str, Any] = {}
    for look in (lambda run: run.checkpoints.gather_state(checkpoint), lambda run: run.checkpoints.check()):
        run = Run(model=parts.model(), stateful={"odd": Odd()}, work_dir=tmp_path)
        with pytest.raises(CheckpointValueError, match=r"stateful\.odd\.lock"), run:
            look(run)
    assert not checkpoint
