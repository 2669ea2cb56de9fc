import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from trainbus.eventloop import Event, SubscribeError

from ..failing import fails
from ..hooks.conftest import make_loop

FORWARD = ("before_module_forward", "after_module_forward")
BACKWARD = ("before_module_backward", "after_module_backward")
EVENTS = [(mount_point, name) for name in ("encoder", "head") for mount_point in FORWARD]
EVENTS += [(mount_point, name) for name in ("head", "encoder") for mount_point in BACKWARD]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)])

    def forward(self, inputs, *, scale=1.0):
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return inputs * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.encoder(inputs, scale=2.0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def inputs():
    return torch.ones(5, 3, requires_grad=True)


@pytest.fixture
def heard(bus):
    """Subscribes to mount points and returns the list that their events' names go to."""

    def subscribe(*mount_points):
        names = []
        for mount_point in mount_points:
            bus.on(mount_point, lambda event: names.append((event.mount_point, event.module_name)))
        return names

    return subscribe


def hooks_on(model):
    """Everything that hangs on the modules of a model."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def test_forward_and_backward_are_published_in_order_by_qualified_name(bus, model, inputs, heard):
    names = heard(*FORWARD, *BACKWARD)
    bus.watch(model, "encoder", "head")
    model(inputs).sum().backward()
    assert names == EVENTS


def test_events_have_module_inputs_keywords_outputs_and_the_gradients_of_autograd(bus, model, inputs):
    events = []
    for mount_point in (*FORWARD, *BACKWARD):
        bus.on(mount_point, events.append)
    bus.watch(model, "encoder")
    model(inputs).sum().backward()
    before, after, above, below = events
    assert before.module is after.module is model.encoder
    assert before.inputs[0] is inputs
    assert torch.equal(after.inputs[0], inputs)
    assert before.kwargs == after.kwargs == {"scale": 2.0}
    bus.off(events.append)
    assert torch.equal(after.outputs, model.encoder(inputs, scale=2.0))
    for event in (above, below):
        assert torch.allclose(event.grad_outputs[0], model.head.weight.sum(0).expand(5, 4))
    assert torch.allclose(below.grad_inputs[0], inputs.grad)


def test_watching_changes_neither_outputs_nor_gradients(bus, model, inputs, heard):
    plain = model(inputs)
    expected = torch.autograd.grad(plain.sum(), model.parameters())
    heard(*FORWARD, *BACKWARD)
    bus.watch(model)
    watched = model(inputs)
    assert torch.equal(watched, plain)
    for grad, other in zip(torch.autograd.grad(watched.sum(), model.parameters()), expected, strict=True):
        assert torch.equal(grad, other)


def test_nothing_is_attached_without_subscribers(bus, model, inputs):
    bus.watch(model)
    bus.on("after_train_iter", lambda event: None)
    assert hooks_on(model) == []
    with bus.on("after_module_forward", lambda event: None):
        attached = hooks_on(model)
        with bus.on("after_module_forward", lambda event: None):
            assert hooks_on(model) == attached
        assert hooks_on(model) == attached
        assert len(attached) > 0
        assert not any(module._forward_pre_hooks or module._backward_hooks for module in model.modules())
        with bus.on("after_module_backward", lambda event: None):
            assert len(model.head._backward_hooks) == 1
        assert hooks_on(model) == attached
    assert hooks_on(model) == []


@pytest.mark.parametrize("event", [Event, "module_event"])
def test_subscribers_of_a_group_get_module_events_and_filters_count_those_of_all_modules(bus, model, inputs, event):
    names, second = [], []
    bus.on(event, lambda one: names.append(one.mount_point))
    bus.on("after_module_forward", lambda event: second.append(event.module_name), every=2)
    with bus.watch(model, "head"):
        model(inputs).sum().backward()
    assert names == [*FORWARD, *BACKWARD]
    bus.watch(model, "encoder.*", "head")
    model(inputs)
    model(inputs)
    assert second == ["encoder.layers.0", "head", "encoder.layers.1"]


def test_a_handle_detaches(bus, model, inputs, heard):
    names = heard(*FORWARD, *BACKWARD)
    with bus.watch(model) as watch:
        pass
    watch.detach()
    model(inputs).sum().backward()
    bus.on("before_module_forward", lambda event: None)
    assert (names, hooks_on(model)) == ([], [])


def test_a_handler_may_cancel_itself_while_the_module_runs(bus, model, inputs):
    names = []

    def once(event):
        names.append(event.module_name)
        subscription.cancel()

    subscription = bus.on("before_module_forward", once)
    bus.watch(model)
    model(inputs)
    assert names == [""]
    assert hooks_on(model) == []


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), ("", "encoder", "encoder.layers.0", "encoder.layers.1", "head")),
        (("head",), ("head",)),
        (("encoder.*",), ("encoder.layers.0", "encoder.layers.1")),
        (("*.[1-9]", "head"), ("encoder.layers.1", "head")),
        (("",), ("",)),
        (("head", "h*"), ("head",)),
    ],
)
def test_patterns_pick_modules_by_qualified_name(bus, model, patterns, names):
    assert bus.watch(model, *patterns).names == names


@pytest.mark.parametrize(
    ("watched", "named"),
    [
        ((Net(), "head", "encodr"), "'encodr' .*'encoder'"),
        ((Net(), "zzz.*"), "'encoder', 'encoder.layers', 'encoder.layers.0'"),
        ((nn.Linear(1, 1), "weight"), "submodules"),
        ((Net(), "encoder.layers"), r"encoder.layers.\*"),
        ((Net(), nn.Linear(1, 1)), "pattern"),
        *(((wrong,), "torch.nn.Module") for wrong in (None, "encoder", Net)),
    ],
)
def test_what_cannot_be_watched_is_an_error_that_names_the_nearest(bus, watched, named):
    with pytest.raises(SubscribeError, match=named):
        bus.watch(*watched)


def test_two_watches_of_one_module_publish_its_events_once(bus, model, inputs, heard):
    names = heard("after_module_forward")
    first = bus.watch(model, "head")
    bus.watch(model, "head", "encoder")
    for detach in (lambda: None, first.detach):
        detach()
        names.clear()
        model(inputs)
        assert names == [("after_module_forward", "encoder"), ("after_module_forward", "head")]


def test_names_are_those_without_wrappers_and_of_two_the_first(bus, model, inputs, heard):
    model.encoder = nn.DataParallel(model.encoder)
    wrapped = torch.compile(model, backend="eager")
    assert bus.watch(wrapped, "encoder.*").names == ("encoder.layers.0", "encoder.layers.1")
    shared = nn.Linear(3, 3)
    names = heard("after_module_forward")
    bus.watch(nn.Sequential(shared, shared), "1", "*")
    shared(inputs)
    assert names == [("after_module_forward", "1")]


@pytest.mark.parametrize("mount_point", ["after_module_forward", "before_module_backward"])
def test_an_error_of_a_handler_names_handler_mount_point_and_module(bus, model, inputs, mount_point):
    bus.on(mount_point, fails(ValueError("no")))
    bus.watch(model, "head")
    with pytest.raises(ValueError, match="no") as caught:
        model(inputs).sum().backward()
    notes = "\n".join(caught.value.__notes__)
    assert "in fail (inline, priority 50" in notes
    assert f"at {mount_point}" in notes
    assert "published by the watched module 'head' (Linear)" in notes


def test_for_an_offloaded_handler_modules_are_watched_only_while_the_bus_is_open(bus, model, inputs):
    names = []
    bus.on("after_module_forward", lambda event: names.append(event.module_name), offload="thread")
    bus.watch(model, "head")
    model(inputs)  # outside of the run, where an event for an offloaded handler would be an error
    with bus:
        assert len(hooks_on(model)) > 0
        model(inputs)
    assert hooks_on(model) == []
    model(inputs)
    assert names == ["head"]


def test_a_copy_of_a_watched_model_is_not_watched(bus, model, inputs, heard):
    names = heard(*FORWARD, *BACKWARD)
    bus.watch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), copy.copy(copy.deepcopy(model)), torch.load(buffer, weights_only=False)):
        other(inputs).sum().backward()
        assert torch.equal(other(inputs), other(inputs))
    assert names == []


def test_an_in_place_operation_on_what_a_module_watched_backward_returns_is_torchs_error(bus, inputs):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    bus.watch(model, "0")
    with bus.on("after_module_forward", lambda event: None):
        model(inputs)
    with bus.on("after_module_backward", lambda event: None), pytest.raises(RuntimeError, match="inplace"):
        model(inputs)


def test_a_watched_model_is_held_weakly(bus, inputs):
    bus.on("after_module_forward", lambda event: None)
    model = Net()
    watch = bus.watch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert watch.names[0] == ""
    bus.on("before_module_forward", lambda event: None)


def test_a_training_run_publishes_from_inside_the_model(bus, model, heard):
    names = heard("after_module_forward")
    bus.watch(model, "head")
    make_loop(bus=bus, model=model, max_epochs=1).run()
    assert names == [("after_module_forward", "head")] * 4


# ------------------------------------------------------------------------------------------------- torch.compile

# The compiler itself looks at .grad of what is between two graphs.
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.mark.parametrize("how", ["wrapper", "in place", "a part"])
@QUIET
def test_a_compiled_model_publishes(bus, model, inputs, heard, how):
    expected = model(inputs)
    names = heard(*FORWARD, *BACKWARD)
    torch.compiler.reset()
    made = torch.compile(model, backend="eager") if how == "wrapper" else model
    if how != "wrapper":
        (model if how == "in place" else model.encoder).compile(backend="eager")
    bus.watch(made, "encoder", "head")
    for _ in range(3):
        outputs = made(inputs)
        outputs.sum().backward()
    assert torch.allclose(outputs, expected)
    assert names == EVENTS * 3


@QUIET
def test_a_compiled_model_publishes_while_there_are_subscribers(bus, model, inputs):
    torch.compiler.reset()
    made = torch.compile(model, backend="eager")
    bus.watch(made, "head")
    made(inputs).sum().backward()
    for _ in range(2):
        names = []
        with bus.on("after_module_forward", lambda event, names=names: names.append(event.module_name)):
            made(inputs)
            made(inputs)
        made(inputs)
        assert names == ["head", "head"]
    assert hooks_on(model) == []


@QUIET
def test_watching_a_model_compiled_with_fullgraph_is_an_error(bus, model, inputs):
    torch.compiler.reset()
    made = torch.compile(model, backend="eager", fullgraph=True)
    bus.watch(made, "head")
    made(inputs)
    names = "_Tap" if torch.__version__ < "2.8" else r"bus.watch"  # the hint of torch 2.7 has no place for ours
    with bus.on("after_module_forward", lambda event: None), pytest.raises(Exception, match=names):
        made(inputs)
    made(inputs)
