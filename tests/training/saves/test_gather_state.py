"""A run's state in a checkpoint of another program: taken out by a new run, training goes on bit by bit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus, CheckpointError, ConfigurationError, Event, Run, TrainingError, Update
from eventloop.errors import CheckpointValueError
from hooks import EMAHook, LoggerHook, ParamSchedulerHook


class Job:
    """A training in which everything depends on everything: random numbers, the order of the data, hooks' states."""

    def __init__(self, work_dir: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.ema = EMAHook(momentum=0.2)
        self.bus = Bus()
        schedule = MultiStepLR(self.optimizer, [4, 7], 0.5)
        self.bus.add(self.ema, ParamSchedulerHook(schedule, by="iter"), LoggerHook(interval=1))
        self.losses: list[float] = []
        generator = torch.Generator().manual_seed(5)
        data = TensorDataset(torch.randn(22, 4, generator=generator), torch.arange(22) % 3)
        self.train_data = DataLoader(data, batch_size=4, shuffle=True)
        self.val_data = DataLoader(data, batch_size=8, shuffle=True)
        self.run = Run(self.bus, model=self.model, optimizer=self.optimizer, work_dir=work_dir, seed=7, **options)

    def learn(self, batch: Any) -> None:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def train(self, *, gather: Any = None, state: Any = None) -> dict[str, Any]:
        """Three epochs and as many validations in a loop of the user's own; ``gather`` is called wherever it may be."""
        told = gather or (lambda where: None)
        with self.run as run:
            if state is not None:
                run.apply_state(state)
            told("begun")
            for epoch in run.epochs(3):
                for batch in run.train(self.train_data):
                    self.learn(batch)
                told(f"trained {epoch}")
                for index, batch in enumerate(run.validate(self.val_data)):
                    run.report(loss=F.cross_entropy(self.model(batch[0]), batch[1]) + torch.rand(()))
                    told(f"validating {epoch} {index}")
                told(f"validated {epoch}")
        return self.outcome

    def drive(self, *, iterations: int | None = None, state: Any = None) -> dict[str, Any]:
        """Three epochs by push; ``iterations`` ends it early and returns what was gathered there."""
        run, drive = self.run, self.run.drive()
        drive.begin_run()
        if state is not None:
            run.apply_state(state)
        drive.begin_train(max_epochs=3)
        while run.progress.epoch < 3 and run.counters.epoch < 3:
            for batch in drive.begin_epoch(self.train_data):
                drive.begin_iteration(batch)
                self.learn(batch)
                drive.end_iteration()
                if run.counters.iter == iterations:
                    checkpoint: dict[str, Any] = {}
                    run.gather_state(checkpoint)
                    saved = through_a_file(checkpoint, run.work_dir)
                    drive.abandon_epoch()
                    drive.end_train()
                    drive.end_run()
                    return saved
            drive.end_epoch()
        drive.end_train()
        drive.end_run()
        return self.outcome

    @property
    def outcome(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "averages": dict(self.ema.average.tensors),
            "optimizer": self.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "counters": self.run.counters.saved(),
            "losses": self.losses[-3:],
        }


def through_a_file(checkpoint: dict[str, Any], directory: Path) -> dict[str, Any]:
    torch.save(checkpoint, directory / "host.pt")
    return torch.load(directory / "host.pt", weights_only=True)


def gathered(tmp_path: Path, where: str) -> dict[str, Any]:
    """Train, and return what ``gather_state`` put into a checkpoint of another program at one moment, from its file."""
    job, found = Job(tmp_path / "saving"), []

    def gather(moment: str) -> None:
        if moment == where:
            checkpoint: dict[str, Any] = {"epoch": 1, "hosts": [1, 2]}
            job.run.gather_state(checkpoint)
            found.append(through_a_file(checkpoint, tmp_path))

    job.train(gather=gather)
    return found[0]


@pytest.mark.parametrize("where", ["begun", "trained 0", "validating 1 1", "validated 1", "trained 2", "validated 2"])
def test_a_new_run_resumes_bitwise(parts, tmp_path, where):
    whole = Job(tmp_path / "whole").train()
    checkpoint = gathered(tmp_path, where)
    assert (checkpoint["epoch"], checkpoint["hosts"]) == (1, [1, 2])
    rest = Job(tmp_path / "rest").train(state=checkpoint)
    if where in ("trained 2", "validated 2"):  # nothing is left to train
        rest.pop("losses")
        whole.pop("losses")
    parts.assert_same(rest, whole)


@pytest.mark.parametrize("iterations", [1, 5, 6, 8, 17])
def test_a_run_driven_by_push_resumes_between_any_two_iterations(parts, tmp_path, iterations):
    whole = Job(tmp_path / "whole").drive()
    state = Job(tmp_path / "saving").drive(iterations=iterations)
    rest = Job(tmp_path / "rest").drive(state=state)
    if iterations == 17:
        rest.pop("losses")
        whole.pop("losses")
    parts.assert_same(rest, whole)


def test_a_new_process_resumes_bitwise(parts, script, tmp_path):
    gathered(tmp_path, "validated 0")
    done = script(f"""
        import sys, torch
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_gather_state import Job
        there = Path({str(tmp_path)!r})
        outcome = Job(there / "rest").train(state=torch.load(there / "host.pt", weights_only=True))
        torch.save({{key: outcome[key] for key in ("model", "averages", "losses")}}, there / "outcome.pt")
    """)
    assert done.returncode == 0, done.stderr
    rest = torch.load(tmp_path / "outcome.pt", weights_only=True)
    whole = Job(tmp_path / "whole").train()
    parts.assert_same(rest, {key: dict(whole[key]) if key == "averages" else whole[key] for key in rest})


def test_it_is_a_tree_of_tensors_and_plain_values(tmp_path):
    """JSON takes all of it but the tensors, and what it makes of them is the same tree."""
    state = gathered(tmp_path, "trained 1")["trainbus"]
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
    checkpoint: dict[str, Any] = {}
    with Run(bus, model=parts.model(), work_dir=tmp_path) as run:
        run.gather_state(checkpoint)
    other = Bus()
    other.on("after_load_checkpoint", lambda e: seen.append((e.path, e.checkpoint["mine"])))
    with Run(other, model=parts.model(), work_dir=tmp_path) as run:
        run.apply_state(checkpoint)
        assert run.resumed_from is None
    assert seen == [("", [1])]
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_before_run_handler_can_apply_a_state_to_a_loop(parts, tmp_path):
    def loop(bus):
        return parts.loop(bus, model=parts.model(dropout=0.3), seed=1, max_epochs=2, work_dir=tmp_path)

    whole = loop(Bus())
    whole.run()
    checkpoint: dict[str, Any] = {}
    with loop(Bus())._new_run() as run:
        run.gather_state(checkpoint)
    bus, order = Bus(), []
    bus.on("before_run", lambda e: e.run.apply_state(checkpoint), priority=0)
    bus.on("before_run", lambda e: order.append("before_run"), priority=100)
    bus.on("after_load_checkpoint", lambda e: order.append("loaded"))
    rest = loop(bus)
    rest.run()
    assert order == ["before_run", "loaded"]  # every hook is ready
    parts.assert_same(rest.model.state_dict(), whole.model.state_dict())


def test_several_runs_resume_from_one_state_in_memory(parts, tmp_path):
    """The training of the first would change the tensors of the optimizer in place that the second one begins with."""
    state = gathered(tmp_path, "trained 0")
    first, second = (Job(tmp_path / name).train(state=state) for name in ("first", "second"))
    parts.assert_same(first, second)


def test_a_state_within_an_accumulation_window_has_its_gradients(parts, tmp_path):
    def job(state: Any = None, stop: int = 8) -> Any:
        bus, model = Bus(), parts.model()
        bus.add(Update(accumulate=3))
        run = parts.loop(bus, model=model, work_dir=tmp_path, max_iters=8)._new_run()
        drive = run.drive()
        drive.begin_run()
        if state is not None:
            run.apply_state(state)
        drive.begin_train(max_iters=8)
        for batch in drive.begin_epoch(parts.batches(8)):
            drive.begin_iteration(batch)
            run.report(loss=parts.step(model, batch))
            drive.end_iteration()
            if run.counters.iter == stop:
                break
        checkpoint: dict[str, Any] = {}
        run.gather_state(checkpoint)
        saved = through_a_file(checkpoint, tmp_path)
        drive.abandon_epoch()
        drive.end_train()
        drive.end_run()
        return saved["trainbus"]

    half = job(stop=5)
    assert half["bus"]["hooks"]["training.update"]["window"]["count"] == 2
    parts.assert_same(job({"trainbus": half})["state_dict"], job()["state_dict"])


# ------------------------------------------------------------------------------------------------------ wrong moments


def test_moments_at_which_no_state_is_gathered_or_applied(parts, tmp_path):
    checkpoint: dict[str, Any] = {}
    run = Run(model=parts.model(), work_dir=tmp_path)
    for _ in range(2):  # before and after it
        with pytest.raises(TrainingError, match=r"run\.gather_state\(\).*with Run"):
            run.gather_state({})
        with pytest.raises(TrainingError, match="with Run"):
            run.apply_state({})
        with run:
            run.gather_state(checkpoint)
            for _ in run.train([1, 2]):
                with pytest.raises(TrainingError):
                    run.gather_state({})
                with pytest.raises(TrainingError):
                    run.apply_state(checkpoint)
            run.gather_state({})
            with pytest.raises(TrainingError):
                run.apply_state(checkpoint)


@pytest.mark.parametrize(
    "mount_point", ["before_train", "after_train_iter", "after_train_epoch", "after_val_epoch", "after_train"]
)
def test_gathering_state_in_a_handler_is_an_error_with_advice(parts, bus, tmp_path, mount_point):
    bus.on(mount_point, lambda e: e.run.gather_state({}))
    with pytest.raises(TrainingError, match=r"run\.request_save\(\)"):
        parts.loop(bus, work_dir=tmp_path).run()


class TrialAsked(Event):
    """An event of a program that trains in the handler."""


def test_a_handler_of_the_programs_own_event_may_train_and_gather_state(parts, tmp_path):
    checkpoint: dict[str, Any] = {}
    program = Bus()

    def train(event: TrialAsked) -> None:
        with Run(model=parts.model(), work_dir=tmp_path) as run:
            for _ in run.train([1, 2]):
                pass
            run.gather_state(checkpoint)

    program.on(TrialAsked, train)
    with program:
        program.publish(TrialAsked())
    assert "trainbus" in checkpoint


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
        run.apply_state(given)


def test_a_state_of_another_model_is_an_error_unless_strict_is_false(parts):
    checkpoint: dict[str, Any] = {}
    with Run(model=torch.nn.Linear(2, 2)) as run:
        run.gather_state(checkpoint)
    with (
        pytest.raises(CheckpointError, match="weight"),
        Run(model=torch.nn.Linear(2, 3)) as run,
    ):
        run.apply_state(checkpoint)
    with capture_logs() as logs, Run(model=torch.nn.Linear(2, 3), strict=False) as run:
        run.apply_state(checkpoint)
    assert any("only in part" in entry["event"] for entry in logs)


def test_a_state_that_is_not_plain_is_an_error_with_its_path(parts):
    class Odd:
        def state_dict(self):
            return {"lock": threading.Lock()}

        def load_state_dict(self, state): ...

    checkpoint: dict[str, Any] = {}
    with (
        pytest.raises(CheckpointValueError, match=r"stateful\.odd\.lock"),
        Run(model=parts.model(), stateful={"odd": Odd()}) as run,
    ):
        run.gather_state(checkpoint)
    assert not checkpoint


def test_a_checkpoint_of_another_system_is_accepted(parts):
    from eventloop.checkpoint import load_pth

    model = torch.nn.Module()
    model.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    tree = load_pth(Path(__file__).parents[2] / "checkpoint" / "data" / "mmengine.pth")
    with Run(model=model) as run:
        run.apply_state(tree)
        assert (run.progress.epoch, run.progress.iter) == (2, 4)
    assert torch.equal(model.layers[0].weight, tree["state_dict"]["layers.0.weight"])
