"""Loops as people write them, killed or stopped and resumed, against the same loop without an interruption."""

import itertools
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from trainbus.eventloop import Bus, Run
from trainbus.eventloop.training.saves.discover import peek
from trainbus.hooks import CheckpointHook, EMAHook, ParamSchedulerHook

from .conftest import act_at


class Killed(BaseException):
    pass


class Scene:
    """One life of a program: a model, an optimizer, a schedule, data, and the run when it has begun."""

    def __init__(self, work_dir: Any, *hooks: Any) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(16, 4)
        self.y = self.x[:, :3].argmax(1)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=4, shuffle=True)
        self.model = torch.nn.Linear(4, 3)
        self.other = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.5)
        self.other_optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.8)
        self.bus = Bus(*hooks)
        self.work_dir = work_dir
        self.lines: list[tuple[str, Any]] = []
        self.kill = "nowhere"
        self.said: list[str] = []

    def run(self) -> Run:
        self.the_run = Run(
            self.bus,
            model={"model": self.model, "other": self.other},
            optimizer={"optimizer": self.optimizer, "other": self.other_optimizer},
            stateful={"schedule": self.schedule},
            work_dir=self.work_dir,
            resume="auto",
        )
        return self.the_run

    def at(self, place: str) -> None:
        """Strike if this is the place: ``stop`` before a place ends the run in order."""
        if self.kill == place:
            raise Killed
        if self.kill == f"stop {place}":
            self.the_run.stop("enough")

    def learn(self, batch: Any, *, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(batch, scale)
        self.optimizer.step()

    def backward(self, batch: Any, scale: float = 1.0) -> torch.Tensor:
        inputs, targets = batch
        loss = cross_entropy(self.model(inputs), targets) * scale
        loss.backward()
        self.the_run.report(loss=loss.detach())
        return loss

    def learn_other(self, batch: Any) -> None:
        inputs, _ = batch
        self.other_optimizer.zero_grad()
        (self.other(inputs) - self.model(inputs).detach()).square().mean().backward()
        self.other_optimizer.step()

    def validate(self) -> float:
        validation = self.the_run.validate(self.loader)
        for inputs, targets in validation:
            self.the_run.report(error=cross_entropy(self.model(inputs), targets))
        return validation.metrics["error"]

    def outcome(self) -> dict[str, Any]:
        parts = {"model": self.model, "other": self.other, "optimizer": self.optimizer, "schedule": self.schedule}
        states = {name: part.state_dict() for name, part in parts.items()}
        counts = (self.the_run.progress.epoch, self.the_run.progress.iter, self.the_run.progress.update)
        return states | {"random": torch.get_rng_state(), "counts": counts, "lr": self.optimizer.param_groups[0]["lr"]}


def tail_that_uses_what_batches_left(scene, run):
    for epoch in run.epochs(3):
        losses = []
        for batch in run.train(scene.loader):
            scene.learn(batch)
            losses.append(1.0)
            scene.at(f"batch of {epoch}")
        assert sum(losses) / len(losses) == 1.0
        scene.at(f"tail of {epoch}")
        scene.schedule.step()


def schedule_behind_the_validation(scene, run):
    for epoch in run.epochs(3):
        for batch in run.train(scene.loader):
            scene.learn(batch)
            scene.at(f"batch of {epoch}")
        scene.at(f"between in {epoch}")
        for index, (inputs, targets) in enumerate(run.validate(scene.loader)):
            run.report(error=cross_entropy(scene.model(inputs), targets))
            scene.at(f"validation of {epoch}" if index else "")
        scene.at(f"tail of {epoch}")
        scene.schedule.step()


def permutation_and_schedule_at_the_head(scene, run):
    for epoch in run.epochs(3):
        order = torch.randperm(16)
        scene.schedule.step()
        with torch.no_grad():
            scene.model.bias.add_(torch.randn(3))
        for start in run.train(range(0, 16, 4)):
            rows = order[start : start + 4]
            scene.learn((scene.x[rows], scene.y[rows]))
            scene.at(f"batch of {epoch}" if start else "")


def validation_at_the_top_of_the_body(scene, run):
    for _ in run.epochs(max_iters=9):
        for index in run.train(range(3), endless=True):
            rows = torch.randint(16, (4,))
            if run.progress.iter % 3 == 0:
                scene.validate()
            scene.learn((scene.x[rows], scene.y[rows]))
            scene.at(f"batch {run.progress.iter}" if index >= 0 else "")


def validation_between_two_halves_of_the_body(scene, run):
    for epoch in run.epochs(2):
        for batch in run.train(scene.loader):
            scene.learn(batch)
            if run.progress.batch_idx % 2:
                scene.validate()
                scene.schedule.step()
            scene.at(f"batch {run.progress.iter}")
        scene.at(f"tail of {epoch}")


def accumulation_by_hand(scene, run):
    for _ in run.epochs(2):
        scene.optimizer.zero_grad()
        batches = run.train(scene.loader)
        for number, batch in enumerate(batches, start=batches.start + 1):
            scene.backward(batch)
            if number % 3 == 0 or number == 4:
                scene.optimizer.step()
                scene.optimizer.zero_grad()
            scene.at(f"batch {run.progress.iter}")


def accumulation_that_is_declared(scene, run):
    for _ in run.epochs(2):
        for batch in run.train(scene.loader, accumulate=3):
            scene.backward(batch)
            if run.update_due:
                scene.optimizer.step()
                scene.optimizer.zero_grad()
            scene.at(f"batch {run.progress.iter}")


def two_passes_in_a_body(scene, run):
    for epoch in run.epochs(2):
        for batch in run.train(scene.loader):
            scene.learn_other(batch)
            scene.at(f"first of {epoch}")
        torch.rand(1)
        for batch in run.train(scene.loader):
            scene.learn(batch)
            scene.at(f"second of {epoch}" if run.progress.batch_idx == 1 else "")


def breaks_behind_a_step(scene, run):
    for epoch in run.epochs(3):
        for batch in run.train(scene.loader):
            scene.learn(batch)
            if run.progress.batch_idx == 2:
                break
        scene.schedule.step()
        scene.at(f"tail of {epoch}")


BY_EPOCH, BY_ITER = {"interval": 1}, {"interval": 1, "by_epoch": False}
BEST = {"save_best": "error", "rule": "less", "save_last": False}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("program", "saving", "kill"),
    [
        *((tail_that_uses_what_batches_left, BY_EPOCH, kill) for kill in ("batch of 1", "tail of 1", "stop tail of 1")),
        *(
            (schedule_behind_the_validation, saving, f"{how}{place} 1")
            for saving in (BY_EPOCH, BEST, BY_EPOCH | BEST)
            for how in ("", "stop ")
            for place in ("batch of", "between in", "validation of", "tail of")
        ),
        *((permutation_and_schedule_at_the_head, saving, "batch of 1") for saving in (BY_EPOCH, BY_ITER)),
        (permutation_and_schedule_at_the_head, BY_EPOCH, "stop batch of 1"),
        *((validation_at_the_top_of_the_body, BEST, f"batch {at}") for at in (3, 4, 6, 8)),
        (validation_at_the_top_of_the_body, {**BY_ITER, "interval": 50}, "stop batch 4"),
        *((validation_between_two_halves_of_the_body, saving, f"batch {at}") for saving in (BEST, BY_ITER) for at in (3, 5)),
        *((accumulation_by_hand, {**BY_ITER, "interval": interval}, f"batch {at}") for interval in (1, 2) for at in (2, 5, 6)),
        *((accumulation_by_hand, BY_EPOCH, f"stop batch {at}") for at in (1, 5)),
        *((accumulation_that_is_declared, BY_ITER, f"batch {at}") for at in (2, 4, 5)),
        *((accumulation_that_is_declared, BY_EPOCH, f"stop batch {at}") for at in (1, 4)),
        *((two_passes_in_a_body, saving, kill) for saving in (BY_EPOCH, BY_ITER) for kill in ("first of 1", "second of 0")),
        *((two_passes_in_a_body, BY_EPOCH, f"stop {kill}") for kill in ("first of 1", "second of 1")),
        *((breaks_behind_a_step, saving, "tail of 1") for saving in (BY_EPOCH, BY_ITER)),
    ],
)
def test_a_loop_that_is_interrupted_and_resumed_ends_like_one_that_was_not(parts, tmp_path, program, saving, kill):
    def live(folder, kill="nowhere"):
        scene = Scene(tmp_path / folder, CheckpointHook(**saving))
        scene.kill = kill
        try:
            with scene.run() as run:
                program(scene, run)
        except Killed:
            return None
        return scene.outcome()

    whole = live("whole")
    first = live("struck", kill)
    assert first is None if not kill.startswith("stop") else first["counts"] != (0, 0, 0)
    parts.assert_same(live("struck"), whole)
    parts.assert_same(live("struck")["model"], whole["model"])  # a finished run, started again


def test_an_iteration_is_the_whole_body_with_its_validation(parts, tmp_path):
    scene = Scene(tmp_path, EMAHook("ExponentialMovingAverage", momentum=0.1, model="model"))
    trace = parts.Trace(scene.bus)
    with scene.run() as run:
        for _ in run.epochs(1):
            for batch in run.train([(scene.x[:4], scene.y[:4])] * 2):
                if run.progress.batch_idx == 1:
                    scene.validate()
                    assert run.progress.stage == "train"
                scene.learn(batch)
    validation = "before_val before_val_epoch 4*(before_val_iter after_val_iter) after_val_epoch after_val"
    body = f"before_train_iter after_train_iter before_train_iter {validation} after_train_iter"
    names = [name for name in trace.names if not name.endswith("forward")]
    assert names == parts.spell(f"before_run before_train before_train_epoch {body} after_train_epoch after_train after_run")
    assert [(e.progress.iter, "loss" in e.outputs) for e in trace.of("after_train_iter")] == [(0, True), (1, True)]
    assert run.progress.update == 2


def test_a_validation_behind_the_step_counts_the_iteration_whose_weights_it_sees(parts, tmp_path):
    scene = Scene(tmp_path, CheckpointHook(save_best="error", rule="less", save_last=False))
    trace = parts.Trace(scene.bus)
    with scene.run() as run:
        for _ in run.epochs(max_iters=1):
            for batch in run.train(scene.loader):
                scene.learn(batch)
                scene.validate()
    (event,) = trace.of("after_val_epoch")
    assert (event.progress.iter, event.progress.update) == (1, 1)
    assert peek(tmp_path / "best_error_iter_1.safetensors").iter == 1


@pytest.mark.parametrize(
    ("around", "bodies", "iters"),
    [
        (lambda batches: itertools.islice(batches, 2), 4, 4),
        (lambda batches: zip(range(2), batches, strict=False), 4, 4),
        (lambda batches: zip(batches, range(2), strict=False), 4, 6),  # it has taken a third batch, which has no body
    ],
)
def test_the_last_body_of_a_loop_that_ends_early_is_an_iteration_like_the_others(parts, tmp_path, around, bodies, iters):
    scene = Scene(None)
    average = EMAHook("ExponentialMovingAverage", momentum=0.1, model="model")
    schedule = torch.optim.lr_scheduler.ExponentialLR(scene.optimizer, 0.9)
    scene.bus.add(average, ParamSchedulerHook(schedule, by="iter"))
    heard = []
    scene.bus.on("after_train_iter", lambda event: heard.append(event.outputs))
    with Run(scene.bus, model={"model": scene.model, "other": scene.other}, optimizer=scene.optimizer) as run:
        scene.the_run = run
        for _ in run.epochs(2):
            for _ in around(run.train(scene.loader)):
                scene.learn((scene.x[:4], scene.y[:4]))
    assert (len(heard), average.average.steps, run.progress.update) == (bodies,) * 3
    assert run.progress.iter == iters


def test_the_place_in_an_epoch_is_known_at_its_head(tmp_path):
    seen = []

    def live(kill=None):
        scene = Scene(tmp_path, CheckpointHook(interval=2, by_epoch=False))
        with scene.run() as run:
            for epoch in run.epochs(2):
                batches = run.train(scene.loader)
                seen.append((epoch, run.progress.epoch, run.progress.batch_idx, batches.start))
                for number, batch in enumerate(batches, start=batches.start):
                    assert number == run.progress.batch_idx
                    scene.learn(batch)
                    if run.progress.iter == kill:
                        raise Killed

    with pytest.raises(Killed):
        live(kill=6)
    live()
    assert seen == [(0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 2, 2)]


def test_an_epoch_that_is_entered_again_is_told_and_an_error_in_it_says_why(tmp_path):
    def live(kill=None):
        scene = Scene(tmp_path)
        if kill is None:
            act_at(scene.bus, "before_val", 1, lambda event: (event.run.checkpoints.save(), event.run.stop()))
        with capture_logs() as logs, scene.run() as run:
            for _ in run.epochs(2):
                losses = []
                for batch in run.train(scene.loader):
                    scene.learn(batch)
                    losses.append(1)
                scene.validate()
                assert sum(losses) / len(losses)
        return logs

    live()
    with pytest.raises(ZeroDivisionError) as caught:
        live(kill="")
    assert any("entered epoch 0 again" in note for note in caught.value.__notes__)


def test_a_variable_that_an_earlier_epoch_has_set_is_an_error_that_says_why_in_a_resumed_run(tmp_path):
    def live(epochs):
        scene = Scene(tmp_path, CheckpointHook(interval=1))
        with scene.run() as run:
            for epoch in run.epochs(epochs):
                if epoch:
                    assert last == epoch - 1  # noqa: F821 - the test's point
                for batch in run.train(scene.loader):
                    scene.learn(batch)
                last = epoch  # noqa: F841

    live(1)
    with pytest.raises(NameError) as caught:
        live(2)
    assert any("this run was resumed" in note and "run.keep()" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", ["another tensor", "in place"])
def test_a_stop_in_a_validation_of_weights_that_the_body_has_exchanged_waits_for_its_end(tmp_path, how):
    def put(parameters, values):
        for parameter, value in zip(parameters, values, strict=True):
            if how == "in place":
                parameter.data.copy_(value)
            else:
                parameter.data = value.clone()

    def live(folder, stop=None):
        scene = Scene(tmp_path / folder, CheckpointHook(interval=1))
        if stop is not None:
            act_at(scene.bus, "before_val_iter", stop, lambda event: event.run.stop())
        with scene.run() as run:
            for _ in run.epochs(3):
                for batch in run.train(scene.loader):
                    scene.learn(batch)
                raw = [one.detach().clone() for one in run.model.parameters()]
                put(run.model.parameters(), [one / 2 for one in raw])
                scene.validate()
                put(run.model.parameters(), raw)
        return [one.detach().clone() for one in run.model.parameters()], run.progress.epoch

    weights, _ = live("whole")
    assert live("stopped", stop=2)[1] < 3
    assert all(map(torch.equal, live("stopped")[0], weights))


def test_an_optimizer_that_the_run_does_not_have_is_told_once(tmp_path, logs):
    scene = Scene(tmp_path)
    other = None
    with scene.run() as run:
        for epoch in run.epochs(3):
            other = other or (torch.optim.Adam(run.model.parameters()) if epoch else None)
            for batch in run.train(scene.loader):
                scene.learn(batch)
                if other is not None:
                    other.step()
    told = [one["event"] for one in logs if "that the run does not have (Adam)" in one["event"]]
    assert len(told) == 1
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # after the run, and of other weights


def test_a_loop_that_was_left_by_break_is_told_when_it_is_started_again(tmp_path, logs):
    def live():
        scene = Scene(tmp_path, CheckpointHook(interval=1))
        with scene.run() as run:
            for epoch in run.epochs(5):
                for batch in run.train(scene.loader):
                    scene.learn(batch)
                if epoch == 1:
                    break
        return [one["event"] for one in logs if "`break` after epoch 2" in one["event"]]

    assert live() == []
    assert len(live()) == 1  # it trains on to the end
    assert len(live()) == 1


def test_a_stop_that_cuts_an_epoch_short_runs_no_further_line_of_its_body(parts, tmp_path):
    scene = Scene(tmp_path, CheckpointHook(interval=1))
    lines = []
    with scene.run() as run:
        for _ in run.epochs(2):
            for batch in run.train(scene.loader):
                scene.learn(batch)
                run.stop("enough")
            lines.append("tail")
    assert lines == []
    assert (tmp_path / "iter_1.safetensors").exists()
    assert run.info["stop_reason"] == "enough"


@pytest.mark.parametrize(("left", "trained"), [("at the end", 4), ("behind a step", 1), ("before a step", 0)])
def test_a_step_outside_of_an_iteration_is_told_once_and_not_counted(tmp_path, logs, left, trained):
    scene = Scene(None)
    with Run(scene.bus, model={"model": scene.model, "other": scene.other}, optimizer=scene.optimizer) as run:
        scene.the_run = run
        for _ in run.epochs(2):
            for batch in run.train(scene.loader):
                if left == "before a step":
                    break
                scene.learn(batch)
                if left == "behind a step":
                    break
            scene.optimizer.step()
            scene.optimizer.step()
        assert run.progress.update == 2 * trained
    expected = ["stepped outside of the body", *([] if trained else ["no optimizer has stepped in the first epoch"])]
    assert [next((one for one in expected if one in entry["event"]), entry["event"]) for entry in logs] == expected


def test_a_save_between_two_steps_of_a_body_is_told_and_has_the_validated_weights(parts, tmp_path, logs):
    scene = Scene(tmp_path, CheckpointHook(save_best="error", rule="less", save_last=False))
    with scene.run() as run:
        for _ in run.epochs(max_iters=1):
            for batch in run.train(scene.loader):
                scene.learn(batch)
                scene.validate()
                validated = parts.weights(scene.model)
                scene.learn(batch)
    assert any("between two optimizer steps" in entry["event"] for entry in logs)
    again = Scene(tmp_path)
    with again.run():
        parts.assert_same(parts.weights(again.model), validated)
