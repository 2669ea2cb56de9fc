import types

import pytest
import torch

from trainbus.eventloop import Event, Live, Progress, Run, UnknownEventError, mount_points
from trainbus.eventloop.errors import EventDefinitionError
from trainbus.eventloop.events import AfterIter, AfterTrainIter, AfterValEpoch, ModuleEvent
from trainbus.eventloop.events.event import lineage, mount_name, resolve
from trainbus.eventloop.events.event import registry as registered
from trainbus.eventloop.events.mount_points import BUILTIN


def test_mount_points_are_listed_in_the_order_of_a_run():
    order = [
        *("before_run", "after_load_checkpoint", "before_train", "before_train_epoch", "before_train_iter"),
        *("before_forward", "after_forward", "after_train_iter", "before_backward", "after_backward"),
        *("before_optimizer_step", "after_optimizer_step", "after_train_epoch"),
        *("before_val", "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_val"),
        *("before_save_checkpoint", "checkpoint_staged", "checkpoint_committed", "after_train"),
        *("before_test", "before_test_epoch", "before_test_iter", "after_test_iter", "after_test_epoch", "after_test"),
        "after_run",
    ]
    assert [name for name in mount_points() if name in order] == order
    modules = {f"{when}_module_{way}" for when in ("before", "after") for way in ("forward", "backward")}
    assert {"checkpoint_failed", "checkpoint_skipped", "on_exception", *modules} <= set(mount_points())


def test_groups_are_resolvable_but_not_mount_points():
    assert "after_iter" not in mount_points()
    assert resolve("after_iter") is AfterIter
    assert resolve("event") is Event
    assert lineage(AfterTrainIter) == ["after_train_iter", "after_iter", "run_event", "event"]


def test_the_mount_point_is_the_class_name_in_snake_case():
    names = [mount_name(name) for name in ("AfterTrainIter", "Densify", "HTTPReady", "Top5Reached")]
    assert names == ["after_train_iter", "densify", "http_ready", "top5_reached"]


def test_events_are_frozen_and_compared_by_identity():
    one, other = (AfterTrainIter(progress=Progress(), outputs={"loss": torch.ones(3)}) for _ in range(2))
    assert one != other
    assert one == one
    assert len({one, other}) == 2
    with pytest.raises(AttributeError):
        one.batch_idx = 2
    first, second = AfterValEpoch(progress=Progress()), AfterValEpoch(progress=Progress())
    assert first.metrics == {}
    assert first.metrics is not second.metrics


def test_the_repr_is_short_and_omits_absent_fields():
    event = AfterTrainIter(progress=Progress(iter=3), outputs={"logits": torch.zeros(100, 10), "loss": 0.5})
    text = repr(event)
    assert "tensor(100, 10)" in text
    assert "loss: 0.5" in text
    assert "run=" not in text
    assert len(text) < 300


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        *(
            (theirs, UnknownEventError, rf"'{theirs}' .*'{ours}'")
            for theirs, ours in (
                ("on_train_batch_end", "after_train_iter"),
                ("on_train_epoch_start", "before_train_epoch"),
                ("on_validation_epoch_end", "after_val_epoch"),
                ("on_validation_batch_start", "before_val_iter"),
                ("on_fit_end", "after_train"),
                ("on_step_end", "after_train_iter"),
                ("on_epoch_begin", "before_train_epoch"),
                ("on_test_end", "after_test"),
                ("after_train_iteration", "after_train_iter"),
            )
        ),
        ("zzzzzzzz", UnknownEventError, r"subclassing Event.*`trainbus events`"),
        (3, TypeError, "3"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_that_of_another_library_with_ours(given, error, named):
    with pytest.raises(error, match=named):
        resolve(given)


def test_subclassing_event_or_a_group_declares_a_mount_point(bus, registry):
    class PointsAdded(Event):
        points: int

    class AfterCalibrationIter(AfterIter):
        pass

    assert resolve("points_added") is PointsAdded
    assert mount_points()[-2:] == ["points_added", "after_calibration_iter"]
    assert not AfterCalibrationIter.group
    heard = []
    bus.on("points_added", heard.append)
    bus.on(PointsAdded, heard.append)
    bus.publish(event := PointsAdded(points=512))
    assert heard == [event, event]


def test_defining_an_event_again_in_its_module_replaces_it_and_keeps_subscriptions(bus, registry):
    class PointsAdded(Event):
        points: int

    first = PointsAdded
    heard = []
    bus.on(PointsAdded, heard.append)
    bus.publish(PointsAdded(points=1))

    class PointsAdded(Event):
        points: int
        colour: str = "red"

    assert resolve("points_added") is PointsAdded is not first
    bus.publish(new := PointsAdded(points=2))
    assert heard[-1] is new


@pytest.mark.parametrize(
    ("name", "module", "named"),
    [
        ("AfterTrainIter", "somewhere.else", r"'after_train_iter' .*trainbus.eventloop.events.mount_points.AfterTrainIter"),
        ("HTTPReady", __name__, "http_ready"),  # another class of the module that has HttpReady
        ("Event", __name__, "'event'"),
    ],
)
def test_a_mount_point_cannot_be_replaced_by_another_class(registry, name, module, named):
    class HttpReady(Event):
        pass

    with pytest.raises(EventDefinitionError, match=named):
        type(Event)(name, (Event,), {"__module__": module})
    assert resolve("after_train_iter") is AfterTrainIter
    assert resolve("http_ready") is HttpReady


@pytest.mark.parametrize("encode", [Event.to_json, Event.to_msgpack])
@pytest.mark.parametrize("live", [{"run": object()}, {"batch": object()}])
def test_live_state_cannot_be_encoded(encode, live):
    with pytest.raises(TypeError):
        encode(AfterTrainIter(progress=Progress(), **live))


def test_an_event_declared_in_a_script_may_have_live_fields(registry):
    module = types.ModuleType("a_script")

    class Rendered(Event):
        image: Live[torch.Tensor]
        view: int = 0

    module.Rendered = Rendered
    assert "tensor(2, 2)" in repr(Rendered(image=torch.zeros(2, 2)))


def test_every_event_of_a_run_says_by_its_progress_which_run():
    without = [name for name in BUILTIN if "progress" not in registered[name].__struct_fields__]
    assert [name for name in without if not issubclass(registered[name], ModuleEvent)] == []


def test_a_checkpoint_holds_no_name_of_the_run():
    run = Run(model=torch.nn.Linear(1, 1), name="one")
    assert run.progress.run_name == "one"
    assert not hasattr(run.counters.saved(), "run_name")
