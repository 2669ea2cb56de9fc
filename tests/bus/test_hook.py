import pytest

from trainbus.eventloop import Bus, Event, Hook, Progress, SubscribeError, mount
from trainbus.eventloop.events import AfterRun, AfterTrainEpoch, AfterTrainIter, BeforeTrainEpoch
from trainbus.eventloop.events.event import resolve

from ..failing import fails

P = Progress()


class Recorder(Hook):
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.calls: list[str] = []


def subscribed(bus: Bus) -> list[str]:
    return [subscription.mount_point for subscription in bus.subscriptions]


def test_add_subscribes_every_mount_point_method_in_the_order_of_the_class_and_offloads_async_ones(bus):
    class Several(Recorder):
        async def after_train_iter(self, event): ...
        def before_run(self, event): ...
        @mount(offload="thread")
        def after_run(self, event): ...
        def helper(self, event): ...
        def _after_run(self, event): ...

    bus.add(Several())
    modes = [(one.mount_point, one.mode) for one in bus.subscriptions]
    assert modes == [("after_train_iter", "async"), ("before_run", "inline"), ("after_run", "thread")]


def test_inherited_methods_are_subscribed_once_in_their_overridden_form_or_taken_out(bus):
    class Base(Recorder):
        def after_run(self, event):
            self.calls.append("base")

        def after_train_iter(self, event): ...

    class Derived(Base):
        after_train_iter = None

        def after_run(self, event):
            self.calls.append("derived")

    bus.add(hook := Derived())
    bus.publish(AfterRun(progress=P))
    assert hook.calls == ["derived"]
    assert subscribed(bus) == ["after_run"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["epoch", "iter"])
def test_generic_methods_are_called_in_all_three_stages(bus, when, what):
    heard = []
    bus.add(made("Generic", **{f"{when}_{what}": lambda self, event: heard.append(type(event))}))
    events = [resolve(f"{when}_{stage}_{what}") for stage in ("train", "val", "test")]
    for event in events:
        bus.publish(event(progress=P))
    assert heard == events


@pytest.mark.parametrize(
    ("method", "near"),
    [
        ("after_train_itre", "after_train_iter"),
        ("before_epochs", "before_epoch"),
        ("on_exceptions", "on_exception"),
        ("afer_train_iter", "after_train_iter"),
        ("checkpoint_commited", "checkpoint_committed"),
    ],
)
def test_a_misspelt_method_is_an_error_with_the_nearest_name(method, near):
    with pytest.raises(SubscribeError, match=f"Misspelt.{method} .*{near}"):
        Bus().add(made("Misspelt", **{method: print, "after_run": print}))


def test_methods_named_like_user_events_subscribe_to_them(bus, registry):
    class Densify(Event):
        points: int

    class Splats(Recorder):
        def densify(self, event):
            self.calls.append(event.points)

    bus.add(hook := Splats())
    bus.publish(Densify(points=5))
    assert hook.calls == [5]


def test_add_takes_all_hooks_or_none_on_an_open_bus_whose_loop_does_not_start(bus, monkeypatch):
    class Offloaded(Recorder):
        async def after_run(self, event): ...

        @mount(offload="thread")
        def after_train_iter(self, event): ...

    with bus:
        monkeypatch.setattr("anyio.run", fails(LookupError("No such backend: trio")))
        with pytest.raises(RuntimeError):
            bus.add(Offloaded())
        assert (bus.subscriptions, bus.hooks) == ((), ())
        bus.publish(AfterTrainIter(progress=P))


def test_a_bus_can_be_made_with_its_hooks():
    first, second = Counter(), Counter("other")
    assert Bus(first, second, timing=True).hooks == (first, second)


class TwoPriorities(Recorder):
    priority = "LOW"

    def after_run(self, event): ...

    @mount(priority=5)
    def after_train_iter(self, event): ...


def test_the_priority_of_add_goes_before_that_of_a_method_of_an_object_and_of_a_class():
    own = TwoPriorities()
    own.priority = 81
    for hook, given, found in (
        (TwoPriorities(), None, {"after_run": 70, "after_train_iter": 5}),
        (own, None, {"after_run": 81, "after_train_iter": 5}),
        (TwoPriorities(), 33, {"after_run": 33, "after_train_iter": 33}),
    ):
        bus = Bus()
        bus.add(hook, priority=given)
        assert {one.mount_point: one.priority for one in bus.subscriptions} == found


class Counter(Hook):
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.count = 0

    def after_run(self, event):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_state_of_hooks_is_saved_by_name_and_restored():
    first = Bus()
    first.add(Counter(), Counter("other"))
    first.publish(AfterRun(progress=P))
    state = first.state_dict()
    assert state["hooks"] == {"Counter": {"count": 1}, "other": {"count": 1}}
    second = Bus()
    second.add(hook := Counter())
    second.load_state_dict(state)
    assert hook.count == 1


def test_off_takes_a_hook_with_all_its_methods(bus):
    bus.add(hook := TwoPriorities())
    bus.off(hook)
    assert (bus.subscriptions, bus.hooks) == ((), ())
    bus.add(hook)
    assert len(bus.subscriptions) == 2


class Diary(Hook):
    def __init__(self):
        self.seen = []

    @mount("after_train_iter", BeforeTrainEpoch, "after_epoch", offload="thread", batch=64)
    def write(self, events):
        self.seen += [event.mount_point for event in events]


def test_a_method_mounted_at_several_points_has_one_lane_in_order():
    bus, diary = Bus(), Diary()
    bus.add(diary)
    order = [BeforeTrainEpoch, AfterTrainIter, AfterTrainIter, AfterTrainEpoch] * 20
    with bus:
        for event in order:
            bus.publish(event(progress=P))
    assert diary.seen == [event(progress=P).mount_point for event in order]
    (subscription,) = bus.subscriptions
    assert subscription.mount_points == ("after_train_iter", "before_train_epoch", "after_epoch")
    assert subscription.stats.delivered == len(order)
    assert [row.mount_point for row in bus.describe().rows] == [
        "before_train_epoch", "after_train_iter", "after_train_epoch", "after_val_epoch", "after_test_epoch"
    ]  # fmt: skip
    bus.off(diary)
    assert not any(bus.wants(event) for event in (AfterTrainIter, BeforeTrainEpoch, AfterTrainEpoch))


def test_an_event_matching_two_names_of_a_mount_is_delivered_once(bus):
    class Twice(Recorder):
        @mount("after_iter", "after_train_iter")
        def look(self, event):
            self.calls.append("once")

    bus.add(hook := Twice())
    bus.publish(AfterTrainIter(progress=P))
    assert hook.calls == ["once"]


class Sparing(Hook):
    def __init__(self, *unused: str) -> None:
        self._unused = unused

    def unused(self):
        return self._unused

    def before_train_iter(self, event): ...

    def after_train_iter(self, event): ...


@pytest.mark.parametrize("unused", ["before_train_iter", ["before_train_iter"]])
def test_methods_that_a_hook_calls_unused_are_not_subscribed(bus, unused):
    class Spares(Sparing):
        def unused(self):
            return unused

    bus.add(Spares())
    assert bus.wants("after_train_iter")
    assert not bus.wants("before_train_iter")


def made(name: str, base: type[Hook] = Hook, **members: object) -> Hook:
    return type(name, (base,), members)()


def mounted(*events: str, **options: object):
    return mount(*events, **options)(lambda self, event: None)


TWICE = Counter()


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ([Counter("good"), made("Empty", compute=print)], "Empty"),
        ([Recorder], r"bus.add\(Recorder\(...\)\)"),
        ([subscribed], r"trainbus.eventloop.Hook"),
        *(([several([Counter(), Counter("other")])], r"bus.add\(\*hooks\)") for several in (list, tuple, set, iter)),
        *(([described], r"add_hooks\(bus, \[") for described in ("EMAHook", {"type": "EMAHook"})),
        ([made("NoPoint", histogram=mounted(every=2))], r"NoPoint.histogram .*'histogram'"),
        ([made("Misspells", after_run=mounted(evry=2))], r"Misspells\..* to after_run: evry= .*every="),
        ([TWICE, TWICE], "Counter"),
        ([made("Saves", Counter, load_state_dict=Hook.load_state_dict)], "Saves .*load_state_dict"),
        ([made("Loads", Counter, state_dict=Hook.state_dict)], "Loads .* state_dict"),
        ([Counter(), Counter()], "'Counter'"),
        ([made("Odd", look=mounted("after_train_iter", "no_such_point"))], "no_such_point"),
        ([Sparing("before_train_itre")], r"Sparing.unused\(\) .*'before_train_itre'.*before_train_iter"),
        ([Sparing("after_val")], r"'after_val'.*after_train_iter"),
        ([made("Elsewhere", ranks="rank1", after_run=print)], "ranks='rank1'"),
    ],
)
def test_add_refuses_all_hooks_for_one_that_cannot_work_and_names_it(bus, added, named):
    with pytest.raises(SubscribeError, match=named):
        bus.add(*added)
    assert (bus.subscriptions, bus.hooks) == ((), ())


def test_a_hook_for_rank0_is_not_called_on_other_ranks(bus):
    class Writes(Recorder):
        ranks = "rank0"

        def after_run(self, event):
            self.calls.append("called")

    bus.add(hook := Writes())
    assert "rank0" not in str(bus.describe())
    bus.internal.set_rank(1, 2)
    assert not bus.wants("after_run")
    bus.publish(AfterRun(progress=P))
    assert hook.calls == []
    bus.internal.set_rank(0, 2)
    bus.publish(AfterRun(progress=P))
    assert hook.calls == ["called"]
    assert "rank0" in str(bus.describe())
