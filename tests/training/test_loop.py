"""A TrainLoop: its events and counts, options that cannot work, and what handlers ask for: the epoch's end, a validation."""

from typing import Any

import pytest
import torch

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError, TrainLoop, Update
from trainbus.eventloop.events import AfterTrainIter
from trainbus.hooks import CheckpointHook, OptimizerHook

ITER = "before_train_iter after_train_iter"
VAL = "before_val before_val_epoch 2*(before_val_iter after_val_iter) after_val_epoch after_val"
TEST = "before_test before_test_epoch 2*(before_test_iter after_test_iter) after_test_epoch after_test"


def epoch(count: int) -> str:
    return f"before_train_epoch {count}*({ITER}) after_train_epoch"


def counts(event: Any) -> tuple[int, int, int, int]:
    progress = event.progress
    return progress.epoch, progress.iter, progress.update, progress.batch_idx


def test_an_iteration_based_run_is_one_long_epoch_with_validation_inside(parts, bus, trace):
    parts.loop(bus, max_iters=5, val_interval=2).run()
    assert trace.names == parts.spell(
        f"before_run before_train before_train_epoch 2*({ITER}) {VAL} 2*({ITER}) {VAL} {ITER} {VAL} "
        "after_train_epoch after_train after_run"
    )
    assert [(e.batch_idx, e.progress.epoch) for e in trace.of("after_train_iter")] == [(index, 0) for index in range(5)]


def test_the_mount_points_inside_an_iteration_surround_forward_backward_and_step_with_one_snapshot_of_progress(parts, bus):
    trace = parts.Trace(bus, inside=True)
    parts.loop(bus, train_data=parts.batches(1), val_data=None, max_epochs=1).run()
    iteration = trace.events[trace.names.index("before_train_iter") : trace.names.index("after_train_epoch")]
    assert [event.mount_point for event in iteration] == [
        *("before_train_iter", "before_forward", "after_forward"),
        "after_train_iter",  # heard here at priority 0; the update comes at 30
        *("before_backward", "after_backward", "before_optimizer_step", "after_optimizer_step"),
    ]
    assert len({id(event.progress) for event in iteration}) == 1


def test_handlers_of_after_train_iter_see_old_weights_before_priority_30_and_new_ones_after(parts, bus):
    seen: dict[int, list[torch.Tensor]] = {29: [], 31: []}
    for priority, weights in seen.items():
        bus.on(AfterTrainIter, lambda e, w=weights: w.append(e.run.model[0].weight.detach().clone()), priority=priority)
    parts.loop(bus, val_data=None, max_epochs=1).run()
    assert not torch.equal(seen[29][0], seen[31][0])
    assert torch.equal(seen[31][0], seen[29][1])


def test_the_loop_adds_its_update_at_priority_30_unless_the_bus_has_one(parts, bus):
    parts.loop(bus)
    (update,) = bus.hooks
    assert isinstance(update, Update)
    assert [s.priority for s in bus.subscriptions if s.hook is update and s.mount_point == "after_train_iter"] == [30]
    other = Bus()
    other.add(mine := Update(accumulate=3), priority=20)
    parts.loop(other)
    assert other.hooks == (mine,)


def test_the_events_of_a_run_by_epochs_and_of_a_test_after_it_and_their_counts(parts, bus, trace):
    """They count from zero, and grow after the events of an iteration, epoch or validation."""
    loop = parts.loop(bus, test_data=parts.batches(2))
    metrics = loop.run()
    loop.test()
    assert trace.names == parts.spell(
        f"before_run before_train {epoch(3)} {VAL} {epoch(3)} {VAL} after_train after_run before_run {TEST} after_run"
    )
    for name in ("before_train_iter", "after_train_iter"):
        assert [counts(e) for e in trace.of(name)] == [
            *((0, 0, 0, 0), (0, 1, 1, 1), (0, 2, 2, 2)),
            *((1, 3, 3, 0), (1, 4, 4, 1), (1, 5, 5, 2)),
        ]
        assert [e.batch_idx for e in trace.of(name)] == [0, 1, 2, 0, 1, 2]
        assert {e.progress.stage for e in trace.of(name)} == {"train"}
    for name in ("before_train_epoch", "after_train_epoch"):
        assert [e.progress.epoch for e in trace.of(name)] == [0, 1]
    assert [(e.progress.epoch, e.progress.iter) for e in trace.of("before_val")] == [(1, 3), (2, 6)]
    for name in ("before_val_iter", "after_val_iter"):
        assert [e.batch_idx for e in trace.of(name)] == [0, 1, 0, 1]
        assert [e.progress.batch_idx for e in trace.of(name)] == [0, 1, 0, 1]
        assert {(e.progress.stage, e.progress.max_epochs, e.progress.max_iters) for e in trace.of(name)} == {("val", 2, None)}
    assert [e.progress.validation for e in trace.of("after_val")] == [0, 1]
    for name in ("after_train", "after_run"):
        event = trace.of(name)[0]
        assert (event.progress.stage, *counts(event)[:3]) == ("train", 2, 6, 6)
    assert metrics == trace.of("after_val_epoch")[-1].metrics
    assert metrics.keys() == {"loss"}


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({"max_epochs": 5}, [1, 2, 3, 4, 5]),
        ({"max_epochs": 5, "val_begin": 3, "val_interval": 2}, [4, 5]),
        ({"max_epochs": 5, "val_interval": 7}, [5]),
        ({"max_epochs": 5, "val_begin": 9}, [5]),
        ({"max_iters": 7}, [7]),
        ({"max_iters": 7, "val_interval": 3}, [3, 6, 7]),
        ({"max_iters": 7, "val_interval": 2, "val_begin": 4}, [4, 6, 7]),
        ({"max_iters": 7, "val_interval": 7}, [7]),
    ],
)
def test_validation_runs_every_val_interval_from_val_begin_and_at_the_end(parts, bus, trace, options, done):
    parts.loop(bus, **options).run()
    assert [e.progress.epoch if "max_epochs" in options else e.progress.iter for e in trace.of("before_val")] == done


def test_the_model_trains_in_training_mode_validates_without_gradients_and_keeps_the_mode_of_every_submodule(parts, bus):
    modes = {}
    model = parts.model()
    model[1].eval()  # a frozen batch norm
    for name in ("before_train_iter", "before_val", "after_val_iter", "after_val_epoch", "after_val", "after_run"):
        bus.on(name, lambda e: modes.setdefault(e.mount_point, (e.run.model.training, torch.is_grad_enabled())))
    parts.loop(bus, model=model).run()
    validating = ("before_val", "after_val_iter", "after_val_epoch")  # ``after_val`` comes when the training mode is back
    assert modes == {name: (name not in validating, name not in validating) for name in modes}
    assert len(modes) == 6
    assert [module.training for module in model] == [True, False, True, True, True]


def test_a_run_knows_its_lengths_from_the_loader_and_the_last_batch_of_an_epoch_with_and_without_a_length(parts, bus):
    lengths, last = [], []
    bus.on("before_train_epoch", lambda e: lengths.append((e.run.data.epoch_length, e.run.data.total_iters)))
    bus.on("after_train_iter", lambda e: last.append(e.run.data.last_batch))
    parts.loop(bus, max_epochs=2, val_data=None).run()
    parts.loop(bus, max_iters=4, val_data=None).run()
    parts.loop(bus, max_epochs=1, val_data=None, train_data=(b for b in parts.batches(3))).run()
    assert lengths == [(3, 6), (3, 6), (3, 4), (None, None)]
    assert last == [*[False, False, True] * 2, *[False] * 3, True, *[False, False, True]]


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"max_epochs": None}, "max_epochs"),
        ({"max_epochs": 1, "max_iters": 1}, "max_iters"),
        *(({"max_epochs": value}, f"max_epochs={value!r}") for value in ("3", 0, -1, True)),
        *(({"max_iters": value}, f"max_iters={value!r}") for value in (0, 1.5)),
        *(({"val_interval": value}, f"val_interval={value!r}") for value in ("3", 0)),
        *(({name: value}, f"{name}={value!r}") for name, value in (("val_begin", 0), ("step", 3), ("step", None))),
        *(({name: value}, f"{name}={value!r}") for name, value in (("val_step", "x"), ("config", "x"), ("name", 3))),
        *(({name: value}, f"{name}={value!r}") for name, value in (("work_dir", 3), ("seed", "7"), ("seed", True))),
        *(({name: 5}, f"{name}=5") for name in ("train_data", "val_data", "test_data")),
        ({"device": "gpu"}, "device='gpu'"),
        ({"metrics": ["acc"]}, r"metrics=\['acc'\]"),
        *(({"metrics": {"x": metric}}, "'x'") for metric in (object(), {"a": 1})),
        ({"stateful": [3]}, r"stateful=\[3\]"),
        ({"stateful": {"x": object()}}, r"stateful\['x'\] \(object\)"),
        ({"step": lambda x: x}, r"step\(x\).*step\(model, batch\)"),
        ({"val_step": lambda model, batch, more: 0}, r"val_step\(model, batch, more\).*'more'"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"optimizer": {"a": 1}}, "'a'.*int"),
        ({"model": 3, "optimizer": None}, "model=3"),
        ({"model": torch.nn.Linear, "optimizer": None}, "model=<class"),
    ],
)
def test_an_option_that_cannot_work_is_an_error_when_the_loop_is_made(parts, options, value):
    with pytest.raises(ConfigurationError, match=value):
        parts.loop(**options)


def test_data_that_yields_its_batches_once_is_refused_where_a_training_needs_them_twice(parts):
    class Anew:
        """An iterator that begins anew, as those of NVIDIA DALI."""

        def __iter__(self):
            self.left = parts.batches(2)
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

    data = parts.batches(2)
    loader = torch.utils.data.DataLoader([0], collate_fn=lambda _: data[0])
    once = {
        "generator": lambda: (one for one in data),
        "list_iterator": lambda: iter(data),
        "map": lambda: map(tuple, data),
        "_SingleProcessDataLoaderIter": lambda: iter(loader),
    }
    for kind, make in once.items():
        for name, options in (("train_data", {"val_data": None}), ("val_data", {"train_data": data})):
            with pytest.raises(ConfigurationError, match=f"{name} is a {kind}.*2 times"):
                parts.loop(**{**options, name: make()}, max_epochs=2)
        parts.loop(train_data=make(), val_data=make(), max_epochs=1, sanity=0).run()
        parts.loop(train_data=make(), max_iters=len(list(make())), val_interval=1000, val_data=make(), sanity=0).run()
        longer = parts.loop(train_data=make(), max_epochs=1, val_data=None)
        with pytest.raises(ConfigurationError, match="train_data"):
            longer.run(max_epochs=2)
    parts.loop(train_data=Anew(), val_data=Anew(), max_epochs=2, sanity=0).run()


def test_training_needs_data_an_optimizer_and_a_model_val_and_test_only_data_and_a_model(parts):
    for option, value in (("train_data", None), ("optimizer", None)):
        with pytest.raises(ConfigurationError, match=option):
            parts.loop(**{option: value}).run()
    with pytest.raises(ConfigurationError, match="model"):
        TrainLoop({}, step=parts.step)
    loop = TrainLoop(parts.model(), step=parts.step, val_data=parts.batches(1), test_data=parts.batches(1))
    assert loop.validate().keys() == loop.test().keys() == {"loss"}
    for name, call in (("val", TrainLoop.validate), ("test", TrainLoop.test)):
        with pytest.raises(ConfigurationError, match=f"{name}_data"):
            call(TrainLoop(parts.model(), step=parts.step))


def test_val_step_and_test_step_are_used_where_they_are_given(parts):
    loop = parts.loop(val_step=lambda m, b: {"v": 1.0}, test_step=lambda m, b: {"t": 2.0}, test_data=parts.batches(1))
    assert loop.validate() == {"v": 1.0}
    assert loop.test() == {"t": 2.0}


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 4}])
def test_a_run_with_nothing_left_to_train_logs_it(parts, bus, trace, limit, logs):
    loop = parts.loop(bus, **limit)
    loop.run()
    assert not logs
    trace.events.clear()
    assert loop.run() == {}
    assert trace.names == ["before_run", "after_run"]
    (told,) = [entry["event"] for entry in logs if "nothing is left to train" in entry["event"]]
    ((name, value),) = limit.items()
    assert f"{name}={value} was reached before" in told


def test_a_resume_of_a_finished_training_that_only_validates_again_logs_that_nothing_is_left(parts, tmp_path, logs):
    for again in (False, True):
        loop = parts.loop(Bus(CheckpointHook(interval=1)), max_epochs=2, val_data=parts.batches(1), work_dir=tmp_path)
        loop.run(resume="auto")
        assert any("nothing is left to train" in entry["event"] for entry in logs) == again


def ask(bus: Bus, mount_point: str, what: str, *at: int) -> None:
    """Call a method of the run at some iterations (or epochs)."""

    def handler(event: Any) -> None:
        counted = event.progress.iter if mount_point == "after_train_iter" else event.progress.epoch
        if counted in at:
            getattr(event.run, what)()

    bus.on(mount_point, handler)


@pytest.mark.parametrize(
    ("what", "mount_point", "at", "options", "names"),
    [
        # The next epoch has all batches; an epoch that was ended is followed by its validation.
        ("end_epoch", "after_train_iter", [1], {"val_data": None}, f"{epoch(2)} {epoch(3)}"),
        ("end_epoch", "after_train_iter", [0], {"max_epochs": 1}, f"{epoch(1)} {VAL}"),
        (
            *("validate_now", "after_train_iter", [1], {"max_epochs": 1, "val_interval": 2, "val_begin": 9}),
            f"before_train_epoch 2*({ITER}) {VAL} {ITER} after_train_epoch {VAL}",
        ),
        # After an epoch, and once only if a validation is due.
        (
            *("validate_now", "after_train_epoch", [0, 2], {"max_epochs": 3, "val_interval": 3}),
            f"{epoch(3)} {VAL} {epoch(3)} {epoch(3)} {VAL}",
        ),
        (
            *("validate_now", "after_train_iter", [1, 2], {"max_iters": 4, "val_interval": 2}),
            f"before_train_epoch {ITER} {f'{ITER} {VAL} ' * 3} after_train_epoch",
        ),
    ],
)
def test_what_a_handler_asks_for_comes_at_the_next_place_for_it(parts, bus, trace, what, mount_point, at, options, names):
    ask(bus, mount_point, what, *at)
    parts.loop(bus, **options).run()
    assert trace.names == parts.spell(f"before_run before_train {names} after_train after_run")


def test_what_is_asked_for_waits_for_the_step_of_an_accumulation_window(parts):
    for what, options in (("end_epoch", {"val_data": None}), ("validate_now", {"val_interval": 2, "val_begin": 9})):
        bus = Bus(OptimizerHook(accumulate=2))
        trace = parts.Trace(bus)
        ask(bus, "after_train_iter", what, 0)
        parts.loop(bus, max_epochs=1, **options).run()
        ended = [event.progress.iter for event in trace.of("before_val")]
        trained = [event.progress.iter for event in trace.of("after_train_iter")]
        assert (trained, ended) == (([0, 1], []) if what == "end_epoch" else ([0, 1, 2], [2, 3]))


def test_in_a_loop_of_ones_own_end_epoch_works_and_validate_now_is_an_error(parts, bus):
    seen = []
    ask(bus, "after_train_iter", "end_epoch", 1)
    with Run(bus, model=parts.model()) as run:
        for epoch in run.epochs(2):
            seen += [epoch for _ in run.train(parts.batches(3))]
        assert seen == [0, 0, 1, 1, 1]
        with pytest.raises(TrainingError, match=r"run\.validate"):
            run.validate_now()


@pytest.mark.parametrize(
    ("what", "mount_point", "options", "told"),
    [
        ("end_epoch", "after_train_iter", {"max_iters": 4}, "end_epoch"),
        ("end_epoch", "after_val", {"max_epochs": 1}, "end_epoch"),
        ("validate_now", "after_train_iter", {"val_data": None}, "val_data="),
    ],
)
def test_what_a_loop_cannot_do_is_an_error(parts, bus, what, mount_point, options, told):
    bus.on(mount_point, lambda event: getattr(event.run, what)())
    with pytest.raises(TrainingError, match=told):
        parts.loop(bus, **options).run()


def test_run_returns_the_metrics_of_a_validation_that_was_asked_for(parts, bus):
    ask(bus, "after_train_iter", "validate_now", 5)
    bus.on("after_train_iter", lambda event: event.run.stop() if event.progress.iter == 6 else None)
    loop = parts.loop(bus, max_epochs=9, val_interval=9)
    assert loop.run().keys() == {"loss"}


def test_a_checkpoint_before_a_validation_that_was_asked_for_resumes_with_it(parts, tmp_path):
    def trained(folder: Any, *, resume: Any = None) -> Any:
        bus = Bus()
        ask(bus, "after_train_iter", "validate_now", 1)
        bus.add(CheckpointHook(interval=2, by_epoch=False))
        trace = parts.Trace(bus)
        loop = parts.loop(bus, val_interval=2, val_begin=9, work_dir=folder)
        loop.run(resume=resume)
        return trace, loop

    whole, ended = trained(tmp_path / "whole")
    trace, resumed = trained(tmp_path / "resumed", resume=tmp_path / "whole" / "iter_2.safetensors")
    assert [event.progress.iter for event in whole.of("before_val")] == [2, 6]
    assert [event.progress.iter for event in trace.of("before_val")] == [2, 6]
    assert trace.names.index("before_val") < trace.names.index("before_train_iter")
    parts.assert_same(resumed.model.state_dict(), ended.model.state_dict())


def test_a_run_knows_the_accumulation_of_its_update_and_the_loader_of_its_validation(parts):
    for hooks, accumulation in (([], 1), ([OptimizerHook(accumulate=4)], 4)):
        bus, seen, data = Bus(*hooks), [], parts.batches(2)
        bus.on("before_train", lambda event: seen.append(event.run.steps.accumulation))  # noqa: B023 - called in this pass
        bus.on("before_val", lambda event: seen.append(event.run.data.evaluation))  # noqa: B023
        parts.loop(bus, max_epochs=1, val_data=data).run()
        assert seen[0] == accumulation
        assert seen[1] is data
    model = parts.model()
    assert Run(Bus(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).steps.accumulation is None  # unknown


# --------------------------------------------------------------------------------------------- history, work_dir


def test_the_history_has_a_row_for_each_epoch_and_validation(parts):
    losses = []
    loop = parts.loop(Bus(), max_epochs=2)
    loop.bus.on("after_train_iter", lambda event: losses.append(event.outputs["loss"].item()))
    assert loop.history == []
    last = loop.run()
    rows = [(row["stage"], row["epoch"], row["iter"]) for row in loop.history]
    assert rows == [("train", 1, 3), ("val", 1, 3), ("train", 2, 6), ("val", 2, 6)]
    assert [row["loss"] for row in loop.history if row["stage"] == "train"] == [losses[2], losses[5]]
    assert loop.history[-1] == {"stage": "val", "epoch": 2, "iter": 6, **last}
    assert {type(value) for row in loop.history for value in row.values()} <= {str, int, float}
    loop.validate()
    loop.history.clear()  # a copy
    assert len(loop.history) == 4


def test_the_history_has_numbers_only_and_keeps_no_tensors_of_a_step(parts):
    """Whatever a step and a metric return, under names of its own as well."""

    class Odd:
        def reset(self): ...
        def update(self): ...
        def compute(self):
            return {"none": None, "text": "x", "flag": True, "nan": float("nan"), "list": [1]}

    def step(model, batch):
        logits = model(batch[0])
        return {"loss": logits.mean(), "first": logits[0, 0], "logits": logits, "epoch": 7, "stage": "mine"}

    loop = parts.loop(Bus(), step=step, val_step=lambda model, batch: {}, metrics={"odd": Odd()}, max_epochs=1)
    loop.run()
    train, val = loop.history
    assert train.keys() == {"stage", "epoch", "iter", "loss", "first"}
    assert (train["stage"], train["epoch"]) == ("train", 1)
    assert val.keys() == {"stage", "epoch", "iter", "odd/flag", "odd/nan"}


def test_the_history_of_iterations_and_after_a_stop(parts):
    loop = parts.loop(Bus(), max_iters=5, val_interval=2)
    loop.run()
    assert [(row["stage"], row["iter"]) for row in loop.history] == [("val", 2), ("val", 4), ("val", 5), ("train", 5)]
    loop = parts.loop(Bus(), max_epochs=2)
    loop.bus.on("after_train_iter", lambda event: event.run.stop(), once=4)
    loop.run()
    assert [(row["stage"], row["iter"]) for row in loop.history] == [("train", 3), ("val", 3)]


def test_the_history_goes_on_in_further_runs_and_forgets_what_is_trained_again(parts, tmp_path):
    loop = parts.loop(Bus(CheckpointHook(1)), max_epochs=2, work_dir=tmp_path)
    loop.run()
    first = loop.history
    loop.run(max_epochs=3)
    assert loop.history[:4] == first
    assert [(row["stage"], row["epoch"]) for row in loop.history[4:]] == [("train", 3), ("val", 3)]
    loop.run(resume=tmp_path / "epoch_1.safetensors")
    assert [(row["stage"], row["epoch"]) for row in loop.history] == [(s, n) for n in (1, 2, 3) for s in ("train", "val")]
    other = parts.loop(Bus(CheckpointHook(1)), max_epochs=3, work_dir=tmp_path)
    other.run(resume=tmp_path / "epoch_2.safetensors")
    assert other.history == loop.history[3:]


def test_the_work_dir_of_a_loop_is_the_given_one_until_the_run_has_chosen(parts, tmp_path):
    assert parts.loop(Bus()).work_dir is None
    for name in ("run", "run-2"):
        loop = parts.loop(Bus(CheckpointHook(1)), max_epochs=1, work_dir=tmp_path / "run")
        assert loop.work_dir == tmp_path / "run"
        loop.run()
        assert loop.work_dir == tmp_path / name
