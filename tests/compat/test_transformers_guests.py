"""Callbacks of Hugging Face's Trainer on our loops do what they do in their own Trainer on the same job."""

import functools
import re
import threading

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from trainbus import attach  # noqa: E402
from trainbus.compat import TransformersHook  # noqa: E402
from trainbus.config import add_hooks  # noqa: E402
from trainbus.eventloop import Bus, ConfigurationError, Run, SubscribeError, TrainingError, TrainLoop  # noqa: E402
from trainbus.hooks import CheckpointHook, OptimizerHook, ParamSchedulerHook  # noqa: E402

from ..bridges.conformance.transformers import gpt2, tokens  # noqa: E402
from ..failing import fails  # noqa: E402
from ..hooks.conftest import Scores  # noqa: E402

MAJOR = int(transformers.__version__.partition(".")[0])
MOMENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


class Network(nn.Module):
    """Returns its loss, as models of the library do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x, labels=None):
        y = self.inner(x).squeeze(-1)
        return {"loss": (y - labels).square().mean(), "logits": y}


def samples(count, seed):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return [{"x": one, "labels": one.sum()} for one in x]


def evaluate(model, batch):
    return {"loss": model(**batch)["loss"]}


class InOrder(Trainer):
    """Takes the samples in their order."""

    def _get_train_sampler(self, *arguments):
        return None


class Job:
    """One training, in their Trainer or on our loop: 2 epochs of 5 batches of 2 samples, a validation after each epoch."""

    def __init__(self, folder, *callbacks, model=Network, data=samples, epochs=2, steps=None, window=1, factor=None, **args):
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = LambdaLR(self.optimizer, factor or (lambda step: 1 / (1 + step)))
        self.train, self.val = data(10, 1), data(4, 2)
        self.callbacks, self.epochs, self.steps, self.window = callbacks, epochs, steps, window
        options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "eval_strategy": "epoch", "logging_steps": 3}
        options |= {"dataloader_pin_memory": False, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        options |= {"gradient_accumulation_steps": window, "max_grad_norm": 1.0, "disable_tqdm": True}
        options |= {"num_train_epochs": epochs} if steps is None else {"max_steps": steps}
        self.args = TrainingArguments(str(folder), **(options | args))

    def trainer(self):
        data = {"train_dataset": self.train, "eval_dataset": self.val, "optimizers": (self.optimizer, self.scheduler)}
        trainer = InOrder(self.model, self.args, callbacks=list(self.callbacks), **data)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def theirs(self):
        """Train with their Trainer."""
        trainer = self.trainer()
        trainer.train()
        self.state = trainer.state
        return self

    def bus(self, *more):
        bus = Bus(*more)
        for one in self.callbacks:
            bus.add(TransformersHook(one, args=self.args))
        self.keeper = callback(on_train_end=self.keep, on_evaluate=self.keep)
        bus.add(self.keeper)
        return bus

    def keep(self, args, state, control):
        self.state = state

    def loop(self, *more, **options):
        update = OptimizerHook(grad_clip=1.0, accumulate=self.window)
        bus = self.bus(update, ParamSchedulerHook(self.scheduler, by="iter"), *more)
        length = {"max_epochs": self.epochs} if self.steps is None else {"max_iters": self.steps * self.window}
        data = {"train_data": DataLoader(self.train, batch_size=2), "val_data": DataLoader(self.val, batch_size=2)}
        steps = {"step": lambda model, batch: model(**batch), "val_step": evaluate}
        return TrainLoop(self.model, self.optimizer, bus=bus, **length | data | steps | options)

    def ours(self, *more, **options):
        """Train with a TrainLoop."""
        self.loop(*more, **options).run()
        return self

    def own(self):
        """Train in a loop of one's own."""
        bus = self.bus()
        train, val = DataLoader(self.train, batch_size=2), DataLoader(self.val, batch_size=2)
        with Run(bus, model=self.model, optimizer=self.optimizer) as run:
            for _ in run.epochs(self.epochs):
                for index, batch in enumerate(run.train(train)):
                    loss = self.model(**batch)["loss"]
                    run.report(loss=loss)
                    if index % self.window == 0:
                        self.optimizer.zero_grad()
                    length = self.window if index < len(train) - len(train) % self.window else len(train) % self.window
                    (loss / length).backward()
                    if (index + 1) % self.window == 0 or index + 1 == len(train):
                        run.report(grad_norm=nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
                        self.optimizer.step()
                        self.scheduler.step()
                for batch in run.validate(val):
                    run.report(loss=self.model(**batch)["loss"])
        return self


def callback(name="Own", **moments):
    """A callback whose moments are functions of args, state and control."""
    methods = {moment: _method(function) for moment, function in moments.items()}
    return type(name, (TrainerCallback,), methods)()


def _method(function):
    return lambda self, args, state, control, **given: function(args, state, control)


class Recorder(TrainerCallback):
    """Records its moments, with what it gets."""

    def __init__(self):
        self.moments = []
        for moment in MOMENTS:
            setattr(self, moment, functools.partial(self.record, moment))

    def record(self, moment, args, state, control, **given):
        facts = {"step": state.global_step, "epoch": state.epoch, "max": state.max_steps, "epochs": state.num_train_epochs}
        facts["there"] = sorted(name for name, value in given.items() if value is not None)
        facts["keys"] = sorted([*given.get("logs", {}), *given.get("metrics", {})])
        self.moments.append((moment, facts))


def history(state):
    """The log lines without times."""
    return [{name: value for name, value in line.items() if not is_time(name)} for line in state.log_history]


def is_time(name):
    return name.endswith(("runtime", "_per_second"))


def assert_close(ours, theirs):
    """The same entries in the same order, with values that differ by rounding at most."""
    assert [list(line) for line in ours] == [list(line) for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert line == {name: close(value, name) for name, value in other.items()}


def close(value, name, rel=1e-6):
    """Transformers 4 rounds the loss of a training in its log."""
    return pytest.approx(value, rel=rel, abs=6e-5 if name == "loss" and MAJOR < 5 else None)


JOBS = {
    "epochs": {},
    "windows": {"window": 2},
    "steps": {"steps": 12, "eval_strategy": "steps", "eval_steps": 4},
    "lines by epoch": {"logging_strategy": "epoch"},
    "first line": {"logging_first_step": True, "logging_steps": 0.3},
}


@pytest.mark.long
@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_moments_lines_and_weights_are_those_of_their_trainer(tmp_path, options):
    val = {"val_interval": options["eval_steps"]} if "eval_steps" in options else {}
    theirs, ours = Recorder(), Recorder()
    one = Job(tmp_path, theirs, **options).theirs()
    other = Job(tmp_path, ours, **options).ours(**val)
    assert [name for name, _ in ours.moments] == [name for name, _ in theirs.moments]
    for (name, mine), (_, facts) in zip(ours.moments, theirs.moments, strict=True):
        assert mine == facts, name
    assert_close(history(other.state), history(one.state))
    for name, value in one.model.state_dict().items():
        assert torch.allclose(other.model.state_dict()[name], value, rtol=1e-6), name


@pytest.mark.parametrize("window", [1, 2])
def test_moments_and_lines_are_the_same_in_a_loop_of_ones_own(tmp_path, window):
    theirs, ours = Recorder(), Recorder()
    one = Job(tmp_path, theirs, window=window).theirs()
    other = Job(tmp_path, ours, window=window).own()
    mine, their = ([(name, facts["step"], facts["epoch"]) for name, facts in one.moments] for one in (ours, theirs))
    assert mine == their
    assert_close(history(other.state), history(one.state))


def test_floating_point_operations_are_counted_as_by_the_trainer(tmp_path):
    job = {"model": lambda: gpt2().eval(), "data": lambda count, seed: tokens(count), "epochs": 1}
    one, other = Job(tmp_path, **job).theirs(), Job(tmp_path, PrinterCallback(), **job).ours()
    assert other.state.total_flos == one.state.total_flos > 0


# ------------------------------------------------------------------------------------------------------ their callbacks


def grows(step):
    """A learning rate that grows, so that the loss falls and then rises."""
    return 0.2 * (1 + step)


def test_early_stopping_stops_at_the_same_step_with_the_same_best_metric(tmp_path):
    options = {"epochs": 12, "factor": grows, "metric_for_best_model": "loss"}
    one = Job(tmp_path, EarlyStoppingCallback(2), **options).theirs()
    other = Job(tmp_path, EarlyStoppingCallback(2), **options).own()
    assert 10 < one.state.global_step < 60
    assert other.state.global_step == one.state.global_step
    assert other.state.best_metric == pytest.approx(one.state.best_metric)
    assert other.callbacks[0].early_stopping_patience_counter == one.callbacks[0].early_stopping_patience_counter == 2


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val for tag in events.Tags()["tensors"]}
    return found, texts


def test_tensorboard_has_the_same_tags_steps_and_values(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    found = {}
    for way in ("theirs", "ours"):
        job = Job(tmp_path, TensorBoardCallback(tensorboard.SummaryWriter(tmp_path / way)))
        job.args.logging_dir = "runs"  # Transformers 4 has the time in it
        getattr(job, way)()
        found[way] = scalars(tmp_path / way)
    (mine, texts), (theirs, their_texts) = found["ours"], found["theirs"]
    assert (list(mine), texts) == (list(theirs), their_texts)
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "eval/loss", "train/train_loss"} <= mine.keys()
    for tag, points in theirs.items():
        assert [step for step, _ in mine[tag]] == [step for step, _ in points], tag
        if not is_time(tag):
            values = close([value for _, value in points], tag.removeprefix("train/"), 1e-5)
            assert [value for _, value in mine[tag]] == values, tag


@pytest.mark.long
@pytest.mark.parametrize("strategy", [{"eval_strategy": "steps", "eval_steps": 3}, {"eval_strategy": "epoch"}])
def test_the_default_flow_decides_as_in_its_trainer_if_it_is_on_the_bus(tmp_path, strategy):
    options = {**strategy, "save_strategy": "steps", "save_steps": 4}
    theirs, ours = Recorder(), Recorder()
    Job(tmp_path / "theirs", theirs, **options).theirs()
    Job(tmp_path / "args", DefaultFlowCallback(), ours, **options).ours(val_interval=2, work_dir=tmp_path / "ours")
    wanted = moments(theirs, *FLOW)
    if "eval_steps" in strategy:  # our loop always validates after the last epoch
        end = wanted.index(("on_epoch_end", 10)) + 1
        wanted[end:end] = [("on_log", 10), ("on_evaluate", 10)]
    assert moments(ours, *FLOW) == wanted
    folders = {int(path.name.partition("-")[2]) for path in (tmp_path / "theirs").glob("checkpoint-*")}
    files = {int(path.stem.partition("_")[2]) for path in (tmp_path / "ours").glob("iter_*.safetensors")}
    assert files == folders == {4, 8, 10}


# ------------------------------------------------------------------------------------------------------ control


class Asking(TrainerCallback):
    """Sets flags of control at one step, at a moment."""

    def __init__(self, flags, step, moment="on_step_end"):
        self.flags, self.step = flags.split(), step
        setattr(self, moment, self.ask)

    def ask(self, args, state, control, **given):
        if state.global_step == self.step:
            for flag in self.flags:
                setattr(control, flag, True)


def moments(recorder, *names):
    return [(name, facts["step"]) for name, facts in recorder.moments if name in names]


FLOW = ("on_epoch_begin", "on_step_end", "on_epoch_end", "on_log", "on_evaluate", "on_train_end")


@pytest.mark.long
@pytest.mark.parametrize("moment", ["on_step_begin", "on_step_end"])
@pytest.mark.parametrize("flag", ["should_training_stop", "should_epoch_stop", "should_log", "should_evaluate"])
def test_a_flag_has_the_effect_that_it_has_there(tmp_path, flag, moment):
    validates = flag == "should_evaluate"
    options = {"eval_strategy": "epoch" if validates else "no", "logging_steps": 100}
    theirs, ours = Recorder(), Recorder()
    Job(tmp_path, Asking(flag, 1, moment), theirs, **options).theirs()
    Job(tmp_path, Asking(flag, 1, moment), ours, **options).ours(**({} if validates else {"val_data": None}))
    assert moments(ours, *FLOW) == moments(theirs, *FLOW)


@pytest.mark.parametrize(("flag", "steps"), [("should_training_stop", [1, 2]), ("should_epoch_stop", [1, 2, 3, 4, 5])])
def test_a_stop_inside_a_window_waits_for_its_step(tmp_path, flag, steps):
    recorder = Recorder()
    Job(tmp_path, Asking(flag, 1, "on_substep_end"), recorder, window=2, eval_strategy="no").ours(val_data=None)
    assert [step for _, step in moments(recorder, "on_step_end")] == steps


def test_a_callback_may_return_another_control_and_the_reason_of_a_stop_names_it(tmp_path):
    replacing = callback("Replacing", on_step_end=lambda *_: transformers.TrainerControl(should_training_stop=True))
    for asking, step in ((replacing, 1), (Asking("should_training_stop", 2), 2)):
        reasons, job = [], Job(tmp_path, asking)
        loop = job.loop()
        loop.bus.on("after_run", lambda event, reasons=reasons: reasons.append(event.run.info["stop_reason"]), priority=100)
        loop.run()
        assert job.state.global_step == step
        assert reasons == [f"{type(asking).__name__} set should_training_stop"]


def test_should_save_writes_a_checkpoint_after_the_validation_that_was_asked_for(tmp_path):
    order = []
    loop = Job(tmp_path, Asking("should_save should_evaluate", 2)).loop(work_dir=tmp_path / "run")
    loop.bus.on("after_val_epoch", lambda event: order.append("validated"))
    loop.bus.on("checkpoint_staged", lambda event: order.append(event.path.rpartition("/")[2]))
    loop.run()
    assert order[:2] == ["validated", "iter_2.safetensors"]


WAYS_OUT = {"should_save": "checkpoints", "should_evaluate": r"validate_now\(\)", "should_epoch_stop": r"end_epoch\(\)"}


@pytest.mark.parametrize(("flag", "reason"), WAYS_OUT.items())
def test_a_decision_that_the_run_cannot_follow_is_an_error_that_names_the_callback(tmp_path, flag, reason):
    with pytest.raises((TrainingError, ConfigurationError), match=rf"Asking .*{flag}.*{reason}"):
        Job(tmp_path, Asking(flag, 1), steps=4).ours(val_data=None)


# ------------------------------------------------------------------------------------------------ checkpoints


class Exported(TrainerCallback, ExportableState):
    """Counts steps; its checkpoints have the count."""

    def __init__(self, start=0):
        self.start, self.count = start, 0

    def on_step_end(self, args, state, control, **given):
        self.count += 1

    def state(self):
        return {"args": {"start": self.start}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("at", ["iter_4", "epoch_1"])
def test_a_resumed_run_goes_on_with_the_state_and_the_lines_of_callbacks(tmp_path, at):
    saves = [CheckpointHook(1), CheckpointHook(4, by_epoch=False, name="by iteration", save_last=False)]
    whole = Job(tmp_path, Exported(), EarlyStoppingCallback(9), epochs=3, factor=grows, metric_for_best_model="loss")
    whole.ours(*saves, work_dir=tmp_path / "run")
    part = Job(tmp_path, Exported(5), EarlyStoppingCallback(7), epochs=3, factor=grows, metric_for_best_model="loss")
    part.loop(work_dir=tmp_path / "part").run(resume=tmp_path / "run" / f"{at}.safetensors")
    assert history(part.state) == history(whole.state)
    assert part.state.best_metric == whole.state.best_metric
    exported, stopping = part.callbacks
    assert (exported.count, exported.start) == (15, 5)  # its arguments stay those of the program
    assert stopping.early_stopping_patience == 7
    assert stopping.early_stopping_patience_counter == whole.callbacks[1].early_stopping_patience_counter > 0
    assert part.state.stateful_callbacks.keys() == {"Exported", "EarlyStoppingCallback"}


def test_a_checkpoint_without_state_of_callbacks_or_with_that_of_others_is_told(tmp_path):
    job = Job(tmp_path, epochs=1)
    bare = job.loop(CheckpointHook(1), val_data=None, work_dir=tmp_path / "bare")
    bare.bus.off(job.keeper)
    bare.run()
    with capture_logs() as logs:
        Job(tmp_path).loop(val_data=None).run(resume=tmp_path / "bare")
    assert "the checkpoint has no state of callbacks; they start anew" in [line["event"] for line in logs]
    Job(tmp_path, Exported(), epochs=1).ours(CheckpointHook(1), work_dir=tmp_path / "one")
    with capture_logs() as logs:
        Job(tmp_path).loop().run(resume=tmp_path / "one")
    (line,) = [line for line in logs if line.get("id") == "state-of-unknown-callbacks"]
    assert line["callbacks"] == ["Exported"]


def test_on_save_comes_on_the_training_thread_when_the_file_is_durable_with_the_state_that_was_saved(tmp_path):
    heard = []

    def hear(args, state, control):
        there = (tmp_path / "run" / f"epoch_{state.global_step // 5}.safetensors").exists()
        heard.append((state.global_step, state.epoch, there, threading.current_thread() is threading.main_thread()))

    Job(tmp_path, callback(on_save=hear), epochs=3).ours(CheckpointHook(1), work_dir=tmp_path / "run")
    assert heard == [(5, 1.0, True, True), (10, 2.0, True, True), (15, 3.0, True, True)]


def test_news_of_a_durable_checkpoint_does_not_undo_the_wish_for_the_next(tmp_path):
    saved = []
    asks = lambda args, state, control: setattr(control, "should_save", True)  # noqa: E731
    always = callback(on_step_end=asks, on_save=lambda *_: saved.append(1))
    loop = Job(tmp_path, always, epochs=1).loop(work_dir=tmp_path / "run")
    loop.bus.on("before_train_iter", lambda event: event.run.checkpoints.wait())
    loop.run()
    assert len(list((tmp_path / "run").glob("iter_*.safetensors"))) == len(saved) == 5


def test_a_checkpoint_that_could_not_be_written_is_no_save(tmp_path, monkeypatch):
    monkeypatch.setattr("trainbus.eventloop.training.saves.write.write", fails(OSError("full")))
    recorder = Recorder()
    Job(tmp_path, recorder).ours(CheckpointHook(1, on_error="log"), work_dir=tmp_path / "run")
    assert not moments(recorder, "on_save")


# ------------------------------------------------------------------------------------------------ the guest on a bus


def mount_points(*callbacks):
    bus = Bus(*callbacks)
    return {name for one in bus.subscriptions for name in one.mount_points}


def test_only_what_a_callback_overrides_is_subscribed():
    few = mount_points(EarlyStoppingCallback())
    assert not few & {"before_train_iter", "after_train_iter", "after_val_iter", "before_optimizer_step"}
    assert mount_points(PrinterCallback()) - few == {"before_train_iter", "after_train_iter"}
    steps = {"before_train_iter", "after_train_iter", "before_optimizer_step"}
    assert mount_points(callback(on_pre_optimizer_step=print)) - few == steps
    assert mount_points(ProgressCallback()) - few >= {"after_val_iter", "after_test_iter"}


def test_callbacks_share_state_and_control_and_are_called_moment_by_moment(tmp_path):
    calls = []

    def note(name, what):
        return lambda args, state, control: calls.append((name, what, id(state), id(control)))

    both = [callback(name, on_step_end=note(name, "step"), on_log=note(name, "log")) for name in ("One", "Two")]
    Job(tmp_path, Asking("should_log", 1), *both, steps=1).ours(val_data=None)
    assert [call[:2] for call in calls[:4]] == [("One", "step"), ("Two", "step"), ("One", "log"), ("Two", "log")]
    assert len({call[2:] for call in calls}) == 1


def test_a_callback_on_the_bus_gets_arguments_that_follow_from_the_run(tmp_path):
    seen = []
    loop = Job(tmp_path, window=2).loop(seed=7, work_dir=tmp_path / "run")
    loop.bus.add(callback(on_train_begin=lambda args, *_: seen.append(args)), EarlyStoppingCallback())
    loop.run()
    (args,) = seen
    assert isinstance(args, TrainingArguments)
    assert (args.output_dir, args.seed, args.num_train_epochs) == (str(tmp_path / "run"), 7, 2)
    assert (args.gradient_accumulation_steps, args.eval_strategy, args.metric_for_best_model) == (2, "epoch", "loss")


def test_arguments_may_be_a_mapping_and_name_the_metric(tmp_path):
    seen = []

    def look(args, state, control):
        steps = [one["step"] for one in state.log_history]
        seen.append((args.greater_is_better, args.logging_steps, state.best_metric, steps))

    loop = Job(tmp_path, epochs=9).loop(val_step=lambda model, batch: {}, metrics={"score": Scores(0.25, 0.75, 0.5)})
    given = {"metric_for_best_model": "score", "logging_steps": 4}
    loop.bus.add(callback(on_train_end=look, on_log=lambda *_: None), TransformersHook(EarlyStoppingCallback(1), args=given))
    loop.run()
    assert seen == [(True, 4, 0.75, [4, 5, 8, 10, 12, 15, 15])]


def test_arguments_that_differ_or_are_none_a_missing_metric_and_a_callback_added_during_a_run_are_errors(tmp_path):
    loop = Job(tmp_path, Recorder()).loop()
    loop.bus.add(TransformersHook(PrinterCallback(), args={"logging_steps": 1}))
    with pytest.raises(ConfigurationError, match="Recorder, PrinterCallback"):
        loop.run()
    loop = Job(tmp_path).loop()
    loop.bus.add(TransformersHook(PrinterCallback(), args=3))
    with pytest.raises(ConfigurationError, match="args=3"):
        loop.run()
    with pytest.raises(TrainingError, match=r"args.metric_for_best_model .*'score'"):
        Job(tmp_path, EarlyStoppingCallback(), metric_for_best_model="score").ours()
    loop = Job(tmp_path).loop()
    loop.bus.on("before_train", lambda event: loop.bus.add(PrinterCallback()))
    with pytest.raises(ConfigurationError, match="PrinterCallback"):
        loop.run()


@pytest.mark.parametrize("attribute", ["state.loss_scale", "control.should_sing", "args.trainer"])
def test_an_attribute_that_is_not_there_is_an_error_that_names_it_and_the_callback(tmp_path, attribute):
    owner, name = attribute.split(".")
    touch = lambda *given: getattr(given[["args", "state", "control"].index(owner)], name)  # noqa: E731
    with pytest.raises(TrainingError, match=f"Touching.on_step_end .*{attribute}"):
        Job(tmp_path, callback("Touching", on_step_end=touch)).ours()


def test_an_argument_that_a_run_does_not_have_is_named_with_the_callback(tmp_path):
    class Schedules(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler, **given):
            lr_scheduler.get_last_lr()

    with pytest.raises(AttributeError, match="get_last_lr") as caught:
        Job(tmp_path, PrinterCallback(), Schedules()).own()
    assert re.search(r"Schedules\.on_step_end.*lr_scheduler", "".join(caught.value.__notes__))


def test_the_length_of_a_training_that_is_unknown_is_an_error_that_names_it(tmp_path):
    job = Job(tmp_path, ProgressCallback())
    bus = job.bus()
    named = pytest.raises(TrainingError, match=r"ProgressCallback\.on_train_begin .*state\.max_steps")
    with named, Run(bus, model=job.model, optimizer=job.optimizer) as run:
        for _ in run.epochs(2):
            for _ in run.train(batch for batch in [1]):
                pass


def test_a_validation_and_a_test_alone_are_told(tmp_path):
    recorder = Recorder()
    job = Job(tmp_path, recorder)
    loop = job.loop(test_data=DataLoader(job.val, batch_size=2))
    loop.validate()
    loop.test()
    names = [name for name, _ in recorder.moments]
    evaluated = ["on_init_end", "on_prediction_step", "on_prediction_step", "on_log", "on_evaluate"]
    assert names == [*evaluated, "on_init_end", "on_prediction_step", "on_prediction_step", "on_predict"]
    keys = ["loss", "runtime", "samples_per_second", "steps_per_second"]
    assert dict(recorder.moments)["on_predict"]["keys"] == [f"test_{key}" for key in keys]


def test_a_callback_without_a_method_that_is_called_is_refused():
    for one in (TrainerCallback(), callback("Pushes", on_push_begin=print)):
        with pytest.raises(SubscribeError, match=type(one).__name__):
            Bus().add(one)
    with pytest.raises(SubscribeError, match=r"transformers\.TrainerCallback .*3"):
        TransformersHook(3)


def test_a_configuration_names_callbacks_and_their_arguments(bus):
    described = {"type": "transformers:EarlyStoppingCallback", "early_stopping_patience": 3}
    given = {"type": "TransformersHook", "callback": {"type": "transformers:PrinterCallback"}, "args": {"logging_steps": 5}}
    add_hooks(bus, [described, given], imports=["transformers"])
    stopping, printer = bus.hooks
    assert (stopping.label, stopping.guest.early_stopping_patience) == ("EarlyStoppingCallback", 3)
    assert (type(printer.guest), printer.args) == (PrinterCallback, {"logging_steps": 5})


def test_callbacks_work_on_a_bus_in_another_trainer(tmp_path):
    theirs, ours = Recorder(), Recorder()
    job = Job(tmp_path, theirs)
    bus = Bus(TransformersHook(ours, args=job.args))
    trainer = job.trainer()
    attach(bus, trainer)
    trainer.train()
    own = [one for one in moments(theirs, *MOMENTS) if one[0] != "on_init_end"]
    assert [one for one in moments(ours, *MOMENTS) if one[0] != "on_init_end"] == own
