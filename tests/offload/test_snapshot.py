import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from trainbus.eventloop import Event, Live, LiveFieldError, Progress, Scalars, from_json, from_msgpack
from trainbus.eventloop.errors import EventDefinitionError
from trainbus.eventloop.events import (
    AfterLoadCheckpoint,
    AfterModuleForward,
    AfterRun,
    AfterTrainIter,
    AfterValEpoch,
    BeforeOptimizerStep,
    CheckpointCommitted,
    OnException,
    RunEvent,
)
from trainbus.eventloop.offload import Owned, detacher
from trainbus.eventloop.offload.detach import detached_type
from trainbus.eventloop.offload.snapshot import Snapshot, capture

detach = detacher()
P = Progress(epoch=2, iter=30, stage="train")


class Measured(Event):
    """A mount point of a user's own, with every kind of field."""

    value: float = 0.0
    values: list[float] = []  # noqa: RUF012 - msgspec copies it
    best: float | None = None
    name: str = ""
    by_name: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    notes: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    model: Live[Any] = msgspec.UNSET
    outputs: Scalars = msgspec.UNSET
    losses: Scalars = msgspec.UNSET
    anything: Any = None
    either: list[float | str] = []  # noqa: RUF012 - msgspec copies it
    pair: tuple[Any, ...] = ()


def arrived(event: Event) -> Any:
    """The event as its offloaded handler gets it."""
    detached = detach(event)
    return detached.resolve() if isinstance(detached, Snapshot) else detached


def test_a_detached_event_is_still_an_instance_of_its_class_and_a_plain_one_is_itself(registry):
    event = arrived(AfterTrainIter(run=object(), progress=P, batch_idx=3, batch=object(), outputs={"loss": torch.tensor(0.5)}))
    for one in (event, arrived(event)):  # it can be detached again
        assert isinstance(one, AfterTrainIter)
        assert one.mount_point == "after_train_iter"
        assert (one.progress, one.batch_idx, one.outputs) == (P, 3, {"loss": 0.5})
    assert detached_type(type(event)) is type(event)

    class Plain(Event):
        number: int

    plain = Plain(number=3)
    assert detach(plain) is plain


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (AfterTrainIter(run=object(), progress=P, outputs={}), "run"),
        (AfterTrainIter(batch=object(), progress=P, outputs={}), "batch"),
        (AfterRun(run=object(), progress=P), "run"),
        (AfterLoadCheckpoint(checkpoint={}, progress=P), "checkpoint"),
        (AfterModuleForward(module=object()), "module"),
        (AfterModuleForward(outputs=torch.ones(1)), "outputs"),
        (OnException(exception=ValueError(), progress=P), "exception"),
    ],
)
def test_touching_a_live_field_is_an_error_that_names_capture(event, field):
    with pytest.raises(LiveFieldError, match=rf"event.{field} of {event.mount_point} .*capture=lambda event: event.{field}"):
        getattr(arrived(event), field)


class Masked(Event):
    share: float
    mask: Live[object]


class Faded(Event):
    share: float
    mask: Live[object] = None


@pytest.mark.parametrize("kind", [Masked, Faded])
def test_an_offloaded_handler_cannot_see_live_fields_whatever_their_default_and_can_encode_the_others(bus, kind):
    seen: list[Any] = []
    bus.on(kind, seen.append, offload="thread")
    with bus:
        bus.publish(kind(share=0.5, mask=[1]))
    [got] = seen
    assert isinstance(got, kind)
    assert got.share == 0.5
    with pytest.raises(LiveFieldError, match="capture="):
        _ = got.mask
    assert b'"mask"' not in got.to_json()
    assert from_json(got.to_json()).share == from_msgpack(got.to_msgpack()).share == 0.5


def test_outputs_are_numbers_in_order_without_other_values():
    outputs = {  # with what arrives of each
        "loss": (torch.tensor(0.5, requires_grad=True) * 2, 1.0),
        "acc": (0.75, 0.75),
        "logits": (torch.zeros(4, 10), None),
        "correct": (torch.tensor(12), 12),
        "double": (torch.tensor(1 / 3, dtype=torch.float64), 1 / 3),
        "done": (torch.tensor(True), True),
        "half": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        "numpy": (np.float32(0.25), 0.25),
        "numpy64": (np.float64(0.125), 0.125),
        "array": (np.array(7), 7),
        "vector": (np.zeros(3), None),
        "count": (3, 3),
        "flag": (False, False),
        "phase": ("warmup", "warmup"),
        "model": (torch.nn.Linear(1, 1), None),
        "lr": (torch.tensor(1e-3), torch.tensor(1e-3).item()),
    }
    event = arrived(AfterTrainIter(progress=P, outputs={name: given for name, (given, _) in outputs.items()}))
    expected = [(name, value) for name, (_, value) in outputs.items() if value is not None]
    assert list(event.outputs.items()) == expected
    assert [type(value) for value in event.outputs.values()] == [type(value) for _, value in expected]


def test_values_are_those_of_the_moment_of_detaching():
    loss, metrics = torch.tensor(1.0), {"acc": 0.5, "curve": [1, 2]}
    outputs = {"loss": loss, "acc": 0.5}
    one = detach(AfterTrainIter(progress=P, outputs=outputs))
    other = detach(AfterValEpoch(progress=P, metrics=metrics))
    loss.fill_(9.0)
    outputs["acc"] = 0.9
    outputs["late"] = 1.0
    metrics["curve"].append(3)
    assert one.outputs == {"loss": 1.0, "acc": 0.5}
    assert arrived(other).metrics == {"acc": 0.5, "curve": [1, 2]}


def test_an_event_may_have_fields_with_such_names(registry):
    class Moved(RunEvent):
        model: str
        device: str = "cpu"

        def stop(self) -> str:
            return "mine"

    event = Moved(model="a", progress=P)
    assert (event.model, event.device, event.stop()) == ("a", "cpu", "mine")
    with pytest.raises(TypeError, match="model"):
        Moved(progress=P)
    event = BeforeOptimizerStep(progress=P, name="first", optimizer="adam")
    assert (event.name, event.optimizer) == ("first", "adam")


@pytest.mark.parametrize("encode", [(Event.to_json, from_json), (Event.to_msgpack, from_msgpack)])
@pytest.mark.parametrize(
    "event",
    [
        AfterTrainIter(run=object(), progress=P, batch_idx=3, outputs={"loss": torch.tensor(0.5), "acc": 1.0}),
        AfterTrainIter(progress=P, outputs={"nan": math.nan, "inf": math.inf, "minus": torch.tensor(-math.inf)}),
        AfterValEpoch(progress=P, metrics={"accuracy": 0.9, "per_class": {"cat": math.nan, "dog": [1.0, math.inf]}}),
        CheckpointCommitted(progress=P, path="NaN", names=["Infinity"], seconds=math.inf),
        Measured(value=math.nan, values=[1.0, -math.inf], best=math.nan, name="NaN", by_name={"a": math.inf}, model=object()),
        Measured(outputs={"a": torch.tensor(1.0)}, losses={"b": torch.tensor(2), "c": math.nan}, notes={"x": [None, "y"]}),
        Measured(notes={"a": "NaN", "b": [math.nan, "-Infinity", "\\\\NaN", "\\\\"], "Infinity": math.inf}),
        Measured(anything="NaN", either=["Infinity", math.inf, "\\NaN"], pair=("NaN", math.nan)),
        Measured(anything=math.nan),
        AfterRun(progress=P),
    ],
)
def test_a_detached_event_survives_encoding_also_with_nan(event, encode):
    write, read = encode
    detached = arrived(event)
    decoded = read(write(detached))
    assert isinstance(decoded, type(event))
    if isinstance(event, RunEvent):
        with pytest.raises(LiveFieldError, match=r"event.run"):
            _ = decoded.run
    for name in event.__struct_fields__:
        if not isinstance(getattr(type(decoded), name), property):
            assert repr(getattr(decoded, name)) == repr(getattr(detached, name)), name


def test_nan_is_written_as_nan_and_never_as_null():
    line = arrived(AfterTrainIter(progress=P, outputs={"loss": torch.tensor(math.nan)})).to_json()
    assert b'"NaN"' in line
    assert b"null" not in line.split(b'"outputs"')[1]


def test_decoding_an_unknown_mount_point_names_the_nearest():
    for read, encode in ((from_json, msgspec.json.encode), (from_msgpack, msgspec.msgpack.encode)):
        with pytest.raises(msgspec.ValidationError, match=r"'after_trian_iter'.*after_train_iter"):
            read(encode({"event": "after_trian_iter"}))


def test_an_event_whose_annotations_cannot_be_resolved_is_a_clear_error(registry):
    class Odd(Event):
        thing: "NowhereToBeFound"  # noqa: F821

    with pytest.raises(EventDefinitionError, match=r"Odd.*NowhereToBeFound"):
        detach(Odd(thing=1))


# ------------------------------------------------------------------------------------------------------- capture


def test_captured_tensors_arrive_as_copies_on_the_cpu_without_their_graph():
    weight = torch.ones(3, requires_grad=True)
    staged = capture({"w": weight * 2, "nested": [weight, (1, "a")], "array": (array := np.zeros(2))})
    with torch.no_grad():
        weight.fill_(5)
    array += 1
    value = staged.resolve()
    assert value["w"].tolist() == [2, 2, 2]
    assert not value["w"].requires_grad
    assert value["nested"][0].tolist() == [1, 1, 1]
    assert value["nested"][1] == (1, "a")
    assert value["array"].tolist() == [0, 0]


def test_owned_values_and_progress_are_passed_without_a_copy_and_other_objects_are_copied():
    class Box:
        def __init__(self):
            self.items = [1]

    tensor = torch.ones(2)
    assert capture(Owned(tensor)).resolve() is tensor
    assert capture(P).resolve() is P
    staged = capture(box := Box())
    box.items.append(2)
    assert staged.resolve().items == [1]


@pytest.mark.parametrize(
    ("live", "name"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        ({"head": torch.nn.Linear(2, 2)}, "Linear"),
        (torch.optim.SGD([torch.zeros(1, requires_grad=True)]), "SGD"),
        (AfterTrainIter(progress=P), r"AfterTrainIter.*capture="),
        ((number for number in range(3)), "generator"),
    ],
    ids=["module", "nested", "optimizer", "event", "generator"],
)
def test_capturing_what_is_live_or_cannot_be_copied_is_a_clear_error(live, name):
    with pytest.raises(TypeError, match=name):
        capture(live)
