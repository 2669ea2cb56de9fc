"""Bring your own loop: a Run around the user's own body."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainbus.eventloop import Bus, BusStateError, ConfigurationError, Event, Progress, Run, TrainingError, TrainLoop
from trainbus.eventloop.checkpoint import unwrapped
from trainbus.eventloop.training import OwnLoop
from trainbus.media import Image

from ..failing import fails
from ..waiting import on_threads

ITER = "before_train_iter after_train_iter"
VAL = "before_val before_val_epoch 2*(before_val_iter after_val_iter) after_val_epoch after_val"


@pytest.fixture
def run(parts, bus):
    model = parts.model()
    return Run(bus, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


class OfRunTests(Event):
    points: int
    progress: Progress


class OfRunTestsAlone(Event):
    pass


@pytest.mark.parametrize("payload", [{"pointz": 3}, {}, {"points": 3, "run": None}])
def test_a_payload_that_does_not_fit_an_event_is_an_error_that_names_the_field(bus, run, payload):
    bus.on(OfRunTests, lambda event: None)
    with run, pytest.raises(TrainingError, match="OfRunTests") as caught:
        run.publish(OfRunTests, **payload)
    assert f" {next(iter(payload.keys() - {'points'}), 'points')}=" in str(caught.value)


def test_run_and_progress_of_an_event_that_does_not_declare_them_name_the_base_that_does(bus):
    bus.on(OfRunTestsAlone, lambda event: event.run)
    with pytest.raises(AttributeError, match="RunEvent"):
        bus.publish(OfRunTestsAlone())
    assert not hasattr(OfRunTestsAlone(), "progress")


def test_run_publish_fills_the_fields_of_user_events_and_errors_show_the_call(bus, run):
    heard = []
    bus.on(OfRunTests, heard.append)
    with run:
        run.publish(OfRunTests, points=3)
        with pytest.raises(TrainingError, match="did you mean 'points'"):
            run.publish(OfRunTests, point=3)
        with pytest.raises(TrainingError, match=r"run.report\(loss=loss\)"):
            run.report(torch.ones(()))
        with pytest.raises(TrainingError, match=r"run.publish\(OfRunTests, ...\)"):
            run.publish(OfRunTests(points=3, progress=run.progress))
        for wrong in ("of_run_tests", int, 3):
            with pytest.raises(TrainingError, match=r"run.publish\(MyEvent, ...\)"):
                run.publish(wrong, points=3)
    assert [(event.points, event.progress.iter) for event in heard] == [(3, 0)]


def test_steps_of_the_body_are_counted_and_published(parts, bus, run):
    trace = parts.Trace(bus, inside=True)
    with run:
        for _ in run.epochs(1):
            for index, batch in enumerate(run.train(parts.batches(4))):
                if index % 2:
                    parts.learn(run, batch)
    assert len(trace.of("before_optimizer_step")) == len(trace.of("after_optimizer_step")) == 2
    assert [e.progress.update for e in trace.of("before_train_iter")] == [0, 0, 1, 1]
    assert trace.of("after_run")[0].progress.update == 2


def test_break_out_of_both_loops_ends_the_iteration_and_cuts_the_epoch_short(parts, run, trace):
    with run:
        for _ in run.epochs(2):
            for batch in run.train(parts.batches(3)):
                parts.learn(run, batch)
                break
            break
    assert trace.names == parts.spell(f"before_run before_train before_train_epoch {ITER} after_train after_run")
    assert (run.progress.iter, run.progress.update) == (1, 1)


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("kept", [False, True])
def test_break_out_of_an_evaluation_restores_modes_and_gradients_and_training_continues(parts, bus, run, trace, stage, kept):
    undone, name = [], stage.removesuffix("idate")
    bus.on(f"before_{name}", lambda e: e.run.defer(lambda: undone.append(e.run.model.training)))
    with run:
        for _ in run.epochs(2):
            for batch in run.train(parts.batches(2)):
                parts.learn(run, batch)
                batches = getattr(run, stage)(parts.batches(2))
                for _ in batches if kept else getattr(run, stage)(parts.batches(2)):
                    assert not run.model.training
                    assert not torch.is_grad_enabled()
                    break
                assert run.model.training
                assert torch.is_grad_enabled()
                assert len(undone) == run.progress.iter + 1
    body = f"before_train_iter before_{name} before_{name}_epoch before_{name}_iter after_train_iter"
    epoch = f"before_train_epoch 2*({body}) after_train_epoch"
    assert trace.names == parts.spell(f"before_run before_train {epoch} {epoch} after_train after_run")


def test_a_with_statement_ends_an_evaluation(parts, run, trace):
    with run:
        with run.validate(parts.batches(2)) as batches:
            for _ in batches:
                break
            assert not run.model.training
            for _ in batches:
                pass
        assert run.model.training
        with run.validate(parts.batches(2)) as cut:
            next(cut)
        assert run.model.training
        assert torch.is_grad_enabled()
    assert trace.names == parts.spell(f"before_run {VAL} before_val before_val_epoch before_val_iter after_run")


def test_an_error_while_undoing_an_abandoned_validation_ends_the_run(parts, bus, run, caplog):
    bus.on("before_val", lambda e: e.run.defer(fails(OSError("not undone"))))
    with pytest.raises(OSError, match="not undone"), run:
        for _ in run.validate(parts.batches(2)):
            break


@pytest.mark.parametrize("kept", ["nothing", "batches", "epochs", "block"])
def test_break_behind_a_step_ends_the_iteration_and_the_epoch_as_any_other_whatever_is_kept(parts, run, trace, kept):
    with run:
        epochs = run.epochs(2)
        for _ in epochs if kept == "epochs" else run.epochs(2):
            batches = run.train(parts.batches(3))
            if kept == "block":
                with batches:
                    for _ in range(2):
                        parts.learn(run, next(batches))
            else:
                for index, batch in enumerate(batches if kept == "batches" else run.train(parts.batches(3))):
                    parts.learn(run, batch)
                    if index == 1:
                        break
            parts.evaluate(run, run.validate(parts.batches(2)))
    epoch = f"before_train_epoch 2*({ITER}) after_train_epoch {VAL}"
    assert trace.names == parts.spell(f"before_run before_train {epoch} {epoch} after_train after_run")
    assert [(e.progress.iter, e.batch_idx) for e in trace.of("before_train_iter")] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert trace.of("after_run")[0].progress.update == 4


def test_batches_can_be_continued_in_another_for_statement(parts, run, trace):
    with run:
        for _ in run.epochs(1):
            batches = run.train(parts.batches(3))
            for _ in batches:
                break
            for batch in batches:
                parts.learn(run, batch)
                break
            parts.evaluate(run, run.validate(parts.batches(2)))
            assert list(batches) == []
    epoch = f"before_train_epoch before_train_iter {ITER} after_train_epoch {VAL}"
    assert trace.names == parts.spell(f"before_run before_train {epoch} after_train after_run")
    assert run.progress.iter == 2


def test_a_second_pass_in_the_body_of_an_epoch_is_one_of_the_same_epoch(parts, run, trace):
    with run:
        for _ in run.epochs(2):
            for batch in run.train(parts.batches(3)):
                parts.learn(run, batch)
                break
            for batch in run.train(parts.batches(1)):
                parts.learn(run, batch)
    passes = f"2*(before_train_epoch {ITER} after_train_epoch)"
    assert trace.names == parts.spell(f"before_run before_train {passes} {passes} after_train after_run")
    assert [event.progress.epoch for event in trace.of("after_train_epoch")] == [0, 0, 1, 1]
    assert run.progress.epoch == 2


def test_nested_training_batches_are_an_error(parts, run):
    with pytest.raises(TrainingError), run:
        for _ in run.epochs(1):
            for _ in run.train(parts.batches(3)):
                list(run.train(parts.batches(3)))


@pytest.mark.parametrize("bus", [[3], torch.nn.Linear(1, 1)], ids=["hooks", "model"])
@pytest.mark.parametrize("make", [Run, TrainLoop])
def test_the_error_for_an_invalid_bus_says_where_hooks_and_models_go(parts, bus, make):
    options = {"step": parts.step} if make is TrainLoop else {}
    with pytest.raises(ConfigurationError, match=r"bus=.*bus.add\(...\)"):
        make(bus=bus, model=parts.model(), **options)
    if make is Run:
        with pytest.raises(ConfigurationError, match="model="):
            Run(bus, optimizer=None)


@pytest.mark.parametrize(
    "options",
    [
        *({"seed": "3"}, {"strict": "no"}, {"resume": True}, {"config": "x"}),
        # What a given host decides: it would be ignored.
        *({"host": OwnLoop(), **option} for option in ({"resume": "auto"}, {"strict": False}, {"accelerator": object()})),
    ],
)
def test_an_invalid_option_of_a_run_is_an_error_at_construction(parts, options):
    name, value = list(options.items())[-1]
    with pytest.raises(ConfigurationError, match="OwnLoop" if "host" in options else f"{name}={value!r}"):
        Run(model=parts.model(), **options)


@pytest.mark.parametrize(
    ("method", "arguments", "options", "value"),
    [
        ("epochs", ["3"], {}, "max_epochs='3'"),
        ("epochs", [], {}, "max_epochs"),
        ("epochs", [], {"max_epochs": 1, "max_iters": 1}, "max_iters"),
        *((method, [5], {}, "loader=5") for method in ("train", "validate", "test")),
        ("train", [[1]], {"endless": "no"}, "endless='no'"),
        ("validate", [[1]], {"metrics": ["acc"]}, r"metrics=\['acc'\]"),
    ],
)
def test_an_invalid_argument_of_a_run_method_is_an_error(run, method, arguments, options, value):
    with pytest.raises(ConfigurationError, match=value):
        getattr(run, method)(*arguments, **options)


@pytest.mark.parametrize("use", ["epochs", "train", "validate", "test"])
@pytest.mark.parametrize("ended", [False, True])
def test_run_methods_outside_of_a_run_are_errors(parts, run, use, ended):
    if ended:
        with run:
            pass
    with pytest.raises(TrainingError, match="write `with Run"):
        next(iter(run.epochs(1) if use == "epochs" else getattr(run, use)(parts.batches(1))))
    assert torch.is_grad_enabled()
    for report in (lambda: run.report(loss=1.0), lambda: run.report(a=Image(torch.zeros(2, 2)))):
        with pytest.raises(TrainingError, match=r"run\.report\(\).* write `with Run"):
            report()


def test_an_epoch_without_training_is_an_error(parts):
    with pytest.raises(TrainingError, match=r"epoch 1.*run.train\(loader\)"):
        with Run(model=parts.model()) as run:
            for _ in run.epochs(2):
                for _ in parts.batches(1):
                    run.report(loss=1.0)


def test_iterating_finished_epochs_again_logs_that_nothing_is_left(parts, logs):
    run = Run(model=parts.model())
    with run:
        for again in (False, True):
            for _ in run.epochs(1):
                assert not again
                list(run.train(parts.batches(1)))
    assert ["nothing is left to train" in entry["event"] for entry in logs] == [True]


@pytest.mark.parametrize("steps", [True, False])
def test_an_epoch_without_a_step_of_the_optimizer_is_warned_of(parts, run, steps, logs):
    with run:
        for _ in run.epochs(2):
            for batch in run.train(parts.batches(2)):
                parts.step(run.model, batch).backward()
                if steps:
                    run.optimizers["optimizer"].step()
    assert sum("no optimizer has stepped" in entry["event"] for entry in logs) == (not steps)


def test_entries_that_are_reported_between_two_iterations_are_told_once(parts, bus, logs):
    seen = []
    bus.on("after_iter", lambda event: seen.append(sorted(event.outputs)))
    with Run(bus, model=parts.model()) as run:
        for epoch in run.epochs(2):
            for _ in run.train(parts.batches(1)):
                run.report(loss=1.0)
            assert not logs
            for _ in run.validate(parts.batches(1)):
                run.report(accuracy=1.0)
            if epoch == 1:
                for name in ("score", "other"):
                    run.report(**{name: 1.0})
    assert seen == [["loss"], ["accuracy"]] * 2
    (told,) = [entry for entry in logs if "between two iterations" in entry["event"]]
    assert told["entries"] == "score"


def test_a_reported_entry_that_loggers_and_metrics_leave_out_is_told_once(parts, logs):
    kept = SimpleNamespace(update=lambda logits: None, compute=lambda: 1.0, reset=lambda: None)  # a metric of ``logits``
    with Run(Bus(), model=parts.model()) as run:
        for _ in run.train([1, 2]):
            run.report(loss=torch.ones(1), count=3, vector=torch.ones(2), text="x")
            assert run.outputs["text"] == "x"
        for _ in run.validate([1], {"kept": kept}):
            run.report(logits=torch.ones(2, 3), labels=torch.ones(2))
            run.report(half=np.float16(1), bit=torch.tensor(True))
            run.report(root=torch.tensor(1j), roots=np.array(1j), long=np.longdouble(1))
    told = {log["entry"]: log["event"] for log in logs if "entry" in log}
    assert list(told) == ["vector", "text", "labels", "root", "roots", "long"]
    assert "shape (2,)" in told["vector"]
    assert "complex64" in told["root"]
    assert len([log for log in logs if "entry" in log]) == 6


@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, None), (None, 1)])
def test_a_second_run_at_the_same_time_is_warned_of_if_one_has_a_seed(parts, first, second, logs):
    with Run(model=parts.model(), seed=first, name="one"), Run(model=parts.model(), seed=second, name="other"):
        pass
    with Run(model=parts.model(), seed=1):
        pass
    with Run(model=parts.model()), Run(model=parts.model()):
        pass
    (warning,) = logs
    assert "each in its own process" in warning["event"]
    assert (warning["run"], warning["other"]) == ("other", "one")


def test_an_optimizer_without_one_parameter_of_the_models_is_warned_of(parts, logs):
    models = {"one": parts.model(), "other": parts.model()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    with Run(model=models, optimizer=optimizers):
        pass
    assert not logs
    with Run(model=models["one"], optimizer=optimizers):
        pass
    (warning,) = logs
    assert warning["optimizer"] == "other"
    assert "no model" in warning["event"]


def test_a_run_leaves_its_bus_as_it_found_it(parts, bus, trace):
    with Run(bus, model=parts.model()):
        assert bus.state == "open"
    assert bus.state == "idle"
    trace.events.clear()
    with bus:
        for _ in range(2):
            with Run(bus, model=parts.model()) as run:
                parts.evaluate(run, run.test(parts.batches(1)))
            assert bus.state == "open"
        test = "before_test before_test_epoch before_test_iter after_test_iter after_test_epoch after_test"
        assert trace.names == parts.spell(f"before_run {test} after_run") * 2
        with pytest.raises(ZeroDivisionError), Run(bus, model=parts.model()):
            1 / 0  # noqa: B018
        assert bus.state == "open"


def test_a_second_ctrl_c_during_on_exception_leaves_nothing_open(bus, run):
    undone = []
    subscription = bus.on("on_exception", fails(KeyboardInterrupt("second")))
    with pytest.raises(KeyboardInterrupt, match="second"), run:
        run.defer(lambda: undone.append("deferred"))
        raise KeyboardInterrupt("first")
    assert undone == ["deferred"]
    assert bus.state == "idle"
    subscription.cancel()
    with Run(bus, model=run.model):  # the thread was let go, and may have another run
        assert bus.state == "open"


def test_a_second_run_on_a_bus_with_an_open_run_is_an_error_that_names_both(parts, bus, trace):
    """The hooks would hear both: the update of one loop would zero and step with the optimizers of the other."""
    refused = []

    def begin(name):
        with pytest.raises(BusStateError, match=rf"'{name}'.*'first'.*'MainThread'.*its own Bus\(\)"):
            Run(bus, model=parts.model(), name=name).drive().begin_run()
        refused.append(name)

    with Run(bus, model=parts.model(), name="first"):
        begin("second")
        on_threads(begin, "third")
        assert refused == ["second", "third"]
        assert bus.state == "open"
    assert trace.names == ["before_run", "after_run"]
    with Run(bus, model=parts.model(), name="second"):
        assert bus.state == "open"


def test_a_bus_that_cannot_be_opened_takes_the_next_run(parts, bus, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(bus.internal, "join", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Run(bus, model=parts.model(), name="first").drive().begin_run()
    with Run(bus, model=parts.model(), name="second"):
        assert bus.state == "open"


def test_open_runs_without_a_name_are_told_apart(parts):
    buses = [Bus() for _ in range(3)]
    traces = [parts.Trace(one) for one in buses]
    with Run(buses[0], model=parts.model()) as first, Run(buses[1], model=parts.model()) as second:
        with Run(buses[2], model=parts.model(), name="run") as third:
            names = [first.name, second.name, third.name]
        assert names[1] not in (names[0], names[2])
    assert len(set(names)) == 3
    assert [trace.of("after_run")[0].progress.run_name for trace in traces] == names


def test_an_unwrapped_model_is_the_one_inside_its_wrappers(parts):
    model = parts.model()
    assert unwrapped(model) is model
    parallel = torch.nn.DataParallel(model)
    for wrapped in (parallel, torch.compile(model, backend="eager"), torch.compile(parallel, backend="eager")):
        assert unwrapped(wrapped) is model
    no_wrapper = torch.nn.Module()
    no_wrapper.module = torch.nn.Linear(1, 1)
    assert unwrapped(no_wrapper) is no_wrapper
