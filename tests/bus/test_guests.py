"""Hooks of other systems on a bus."""

import sys
import types

import pytest

from trainbus.compat.guests import GUESTS
from trainbus.config import add_hooks
from trainbus.eventloop import Bus, ConfigurationError, Hook, SubscribeError, mount
from trainbus.eventloop.bus import GuestHook, GuestKind, guests, register_guests
from trainbus.eventloop.events import AfterRun, BeforeRun, Progress


class Theirs:
    """The base class of hooks of another system."""

    priority = 70

    def __init__(self, words: str = "") -> None:
        self.words = words
        self.calls: list[str] = []

    def at(self, moment: str) -> None:
        self.calls.append(moment)


class Special(Theirs): ...


class Refused: ...


class Adapter(GuestHook):
    def __init__(self, guest):
        super().__init__(guest)
        self.priority = guest.priority

    def before_run(self, event):
        self.guest.at("before_run")

    @mount(priority=20)
    def after_run(self, event):
        self.guest.at("after_run")


@pytest.fixture(autouse=True)
def theirs(monkeypatch, change):
    """A module of the other system, with an adapter for its hooks."""
    module = types.ModuleType("theirs")
    module.Theirs, module.Refused, module.Adapter = Theirs, Refused, Adapter
    monkeypatch.setitem(sys.modules, "theirs", module)
    change(guests.KINDS, {})
    register_guests(
        *GUESTS,
        GuestKind(f"{Theirs.__module__}.Theirs", adapter="theirs:Adapter", name="theirs.Hook"),
        GuestKind(f"{Theirs.__module__}.Refused", refusal="give it to its own trainer"),
    )


@pytest.mark.parametrize("kind", [Theirs, Special])
def test_a_guest_is_called_through_its_adapter_which_is_a_hook_with_the_name_of_its_class(kind):
    bus, guest = Bus(), kind()
    bus.add(guest)
    for event in (BeforeRun, AfterRun):
        bus.publish(event(progress=Progress()))
    assert guest.calls == ["before_run", "after_run"]
    (hook,) = bus.hooks
    assert isinstance(hook, GuestHook)
    assert hook.guest is guest
    assert {one.label.partition(".")[0] for one in bus.subscriptions} == {kind.__name__}


def test_off_removes_a_guest_by_itself_or_by_its_adapter():
    bus, guest = Bus(), Theirs()
    for form in (lambda: guest, lambda: bus.hooks[0]):
        bus.add(guest)
        bus.off(form())
        assert (bus.hooks, bus.subscriptions) == ((), ())
    with pytest.raises(SubscribeError):
        bus.off(guest)


def test_the_same_guest_cannot_be_added_twice():
    bus, guest = Bus(), Theirs()
    bus.add(guest)
    for again in (guest, Adapter(guest)):
        with pytest.raises(SubscribeError, match="Theirs"):
            bus.add(again)
    with pytest.raises(SubscribeError, match="Special"):
        bus.add(twin := Special(), twin)
    bus.add(Theirs())  # another one


def test_a_priority_given_to_add_is_that_of_guests_and_others(bus):
    class Ours(Hook):
        def before_run(self, event): ...

    bus.add(Theirs(), Ours(), priority=33)
    found = sorted((one.mount_point, one.priority) for one in bus.subscriptions)
    assert found == [("after_run", 20), ("before_run", 33), ("before_run", 33)]
    assert bus.hooks[0].priority == 33


class Waits(Theirs):
    async def before_run(self): ...  # nothing would await it


@pytest.mark.parametrize(
    ("guest", "named"),
    [
        (Waits(), r"Waits\.before_run"),
        (object(), r"bus.add takes Hook objects and guests \(.*theirs.Hook\), not object; derive the class"),
        (Refused(), "Refused"),
        (Theirs, r"bus.add\(Theirs\(...\)\)"),
    ],
)
def test_for_a_guest_that_cannot_work_no_hook_is_added_and_the_error_names_the_cause(bus, guest, named):
    with pytest.raises(SubscribeError, match=named):
        bus.add(Theirs(), guest)
    assert bus.hooks == ()


def test_a_configuration_makes_guests(bus):
    described = {"type": "theirs:Theirs", "words": "two", "priority": 5, "name": "mine"}
    add_hooks(bus, [described, {"type": Theirs}, Theirs("given")], imports=["theirs"])
    assert [(hook.label, hook.guest.words) for hook in bus.hooks] == [("mine", "two"), ("Theirs", ""), ("Theirs", "given")]
    assert [one.priority for one in bus.subscriptions if one.mount_point == "before_run"] == [5, 70, 70]
    with pytest.raises(ConfigurationError, match=r"hooks\[0\].type: Refused"):
        add_hooks(bus, ["theirs:Refused"], imports=["theirs"])
    with pytest.raises(ConfigurationError, match=r"hooks\[0\]"):
        add_hooks(bus, [{"type": "theirs:Theirs", "word": "misspelt"}], imports=["theirs"])
