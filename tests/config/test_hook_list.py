"""``add_hooks``: hooks from tables, typed by their constructors, and what the errors say."""

import enum
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from rich.console import Console

from trainbus.config import add_hooks
from trainbus.eventloop import Bus, ConfigurationError, Hook, Priority, SubscribeError, mount
from trainbus.eventloop.annotations import OptionsOf
from trainbus.eventloop.registry import register
from trainbus.hooks import (
    ConsoleWriter,
    EMAHook,
    ExponentialMovingAverage,
    LoggerHook,
    MomentumAnnealingEMA,
    PreemptionHook,
    Writer,
)

from ..failing import said

SCHEDULERS = ("torch.optim.lr_scheduler",)


@register
class Everything(Hook):
    """Takes all kinds of options, and keeps what it got."""

    def __init__(
        self,
        number: int = 1,
        *,
        share: float = 0.5,
        flag: bool = False,
        choice: Literal["a", "b"] = "a",
        names: Sequence[str] = (),
        pair: tuple[int, float] | None = None,
        table: Mapping[str, int] | None = None,
        path: Path | None = None,
        function: Callable[[int], int] | None = None,
        kind: type[torch.nn.Module] = torch.nn.ReLU,
        console: Console | None = None,
        writer: Writer | None = None,
        writers: Mapping[str, Writer] | None = None,
        anything: Any = None,
        untyped=3,
    ):
        self.got = dict(locals())

    def after_run(self, event):
        pass


@register
class NeedsModel(Hook):
    def __init__(self, model: torch.nn.Module, scale: float = 1.0):
        self.model = model

    def after_run(self, event):
        pass


@register
class Forwards(Hook):
    """Hands its options on to a class of the user's choice."""

    def __init__(self, kind: type[torch.nn.Module] = torch.nn.Dropout, **options: Annotated[Any, OptionsOf("kind")]):
        self.made = kind(**options)

    def after_run(self, event):
        pass


def bus_of(*hooks, **options):
    bus = Bus()
    add_hooks(bus, hooks, **options)
    return bus


def add(*hooks, **options):
    return bus_of(*hooks, **options).hooks


def got(**options):
    return add({"type": "Everything", **options})[0].got


def network():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def double(number):
    return 2 * number


# ------------------------------------------------------------------------------------------------------ what is accepted


class PriorityStatus(enum.Enum):
    """As iMIX spells it."""

    HIGHER = 10
    LOWER = 50


IMIX = {"HIGHEST": 0, "HIGHER": 10, "HIGH": 20, "NORMAL": 30, "LOW": 40, "LOWER": 50, "LOWEST": 60}


@pytest.mark.parametrize(
    ("level", "priority"), [*IMIX.items(), *((name.lower(), IMIX[name]) for name in IMIX), (PriorityStatus.LOWER, 50), (7, 7)]
)
def test_imixs_levels_are_on_imixs_scale(level, priority):
    assert [one.priority for one in bus_of({"type": "Everything", "level": level}).subscriptions] == [priority]


def test_names_classes_and_hooks_are_accepted_as_entries():
    hooks = add("EMAHook", {"type": LoggerHook, "interval": 5}, LoggerHook, PreemptionHook())
    assert [type(hook) for hook in hooks] == [EMAHook, LoggerHook, LoggerHook, PreemptionHook]


def test_a_priority_of_the_configuration_overrides_the_methods():
    class Marked(Hook):
        @mount(priority=Priority.HIGH)
        def after_run(self, event):
            pass

    bus = bus_of({"type": Marked, "priority": "LOWEST"}, {"type": Marked})
    assert sorted(one.priority for one in bus.subscriptions) == [Priority.HIGH, Priority.LOWEST]


def test_names_distinguish_hooks_of_a_class_without_a_name_option():
    hooks = add({"type": "Everything", "name": "one"}, {"type": "EMAHook", "name": "two"}, "EMAHook")
    assert [hook.label for hook in hooks] == ["one", "two", "EMAHook"]


def test_text_is_converted_to_the_annotated_type_and_omitted_options_have_their_defaults():
    given = {"share": 1, "names": ["a"], "pair": [1, 2], "table": {"x": 1}, "path": "here", "choice": "b"}
    options = got(**given)
    assert {name: options[name] for name in given} == given | {"pair": (1, 2.0), "path": Path("here")}
    assert type(options["share"]) is float
    assert options["kind"] is torch.nn.ReLU


def test_functions_classes_and_objects_are_given_by_name_and_options_of_a_function_are_filled_in():
    mean = {"type": "statistics:mean", "data": [1, 2, 3]}
    console = {"type": "rich.console:Console", "width": 33}
    table = {"type": "Everything", "function": "operator:neg", "kind": "torch.nn:Tanh", "console": console}
    table |= {"anything": {"type": "torch:float16"}, "untyped": "torch:x"}
    imports = ["operator", "rich.console", "statistics", "torch"]
    options, other = (hook.got for hook in add(table, {"type": "Everything", "name": "b", "function": mean}, imports=imports))
    assert options["function"](3) == -3
    assert options["kind"] is torch.nn.Tanh
    assert options["console"].width == 33
    assert options["anything"] is torch.float16  # used and not called
    assert options["untyped"] == "torch:x"  # where the signature says nothing, text is text
    assert other["function"]() == 2


def test_objects_are_tables_with_a_type():
    options = got(writer={"type": "JSONLinesWriter", "interval": 3}, writers={"main": "ConsoleWriter"})
    assert options["writer"].interval == 3
    assert type(options["writers"]["main"]) is ConsoleWriter


def test_objects_in_a_python_list_are_used_unchanged():
    objects = {"console": Console(), "writer": ConsoleWriter(), "function": double, "kind": torch.nn.Tanh, "path": Path("x")}
    options = got(**objects, anything=[objects["writer"]])
    assert {name: options[name] for name in objects} == objects
    assert options["anything"] == [objects["writer"]]


def short(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


SHORT = "parts_of_hook_list_tests:short"


@pytest.mark.parametrize(
    ("scheduler", "names"),
    [
        ({"type": "torch.optim.lr_scheduler:StepLR", "step_size": 3}, ["StepLR"]),
        (SHORT, ["StepLR"]),
        ([SHORT], ["StepLR"]),
        ({"one": SHORT, "two": {"type": SHORT}}, ["one", "two"]),
    ],
)
def test_a_scheduler_gets_the_optimizer_is_a_table_or_a_name_and_several_have_names(monkeypatch, scheduler, names):
    monkeypatch.setitem(sys.modules, "parts_of_hook_list_tests", sys.modules[__name__])
    _, optimizer = network()
    table = {"type": "ParamSchedulerHook", "by": "epoch", "scheduler": scheduler}
    (hook,) = add(table, imports=[*SCHEDULERS, "parts_of_hook_list_tests"], optimizer=optimizer)
    assert list(hook.schedulers) == names
    assert all(one.optimizer is optimizer for one in hook.schedulers.values())


def test_nested_schedulers_get_the_optimizer():
    _, optimizer = network()
    constant = {"type": "torch.optim.lr_scheduler:ConstantLR", "factor": 0.5}
    root = {"type": "torch.optim.lr_scheduler:LambdaLR", "lr_lambda": "math:sqrt"}
    table = {"type": "torch.optim.lr_scheduler:SequentialLR", "schedulers": [constant, root], "milestones": [2]}
    imports = ["torch.optim.lr_scheduler", "math"]
    (hook,) = add({"type": "ParamSchedulerHook", "by": "iter", "scheduler": table}, imports=imports, optimizer=optimizer)
    (scheduler,) = hook.schedulers.values()
    assert [type(one).__name__ for one in scheduler._schedulers] == ["ConstantLR", "LambdaLR"]


def test_of_several_optimizers_a_table_names_one():
    (_, one), (_, other) = network(), network()
    options = {"imports": SCHEDULERS, "optimizer": {"generator": one, "critic": other}}
    table = {"type": "torch.optim.lr_scheduler:StepLR", "step_size": 3}
    hook = {"type": "ParamSchedulerHook", "by": "epoch", "scheduler": table | {"optimizer": "critic"}}
    (made,) = add(hook, **options)
    assert made.schedulers["StepLR"].optimizer is other
    where = "hooks[0].scheduler.optimizer"
    assert said(add, hook | {"scheduler": table | {"optimizer": "crtic"}}, **options) == (
        f"{where}: 'crtic' is not an optimizer (did you mean 'critic'?); the optimizers are generator, critic"
    )
    assert said(add, hook | {"scheduler": table}, **options) == (
        f"{where}: is missing: StepLR needs it (Optimizer); name one of generator, critic"
    )


def test_a_hook_that_needs_the_model_gets_it():
    model, _ = network()
    assert add("NeedsModel", model=model)[0].model is model
    assert said(add, "NeedsModel") == "hooks[0].model: is missing: NeedsModel needs it (Module)"


def test_forwarded_options_have_the_types_of_their_receiver():
    (hook,) = add({"type": "EMAHook", "ema_type": "MomentumAnnealingEMA", "gamma": 50})
    assert (hook._type, hook._options) == (MomentumAnnealingEMA, {"gamma": 50})
    assert said(add, {"type": "EMAHook", "gama": 50, "ema_type": "MomentumAnnealingEMA"}) == (
        "hooks[0].gama: EMAHook with MomentumAnnealingEMA has no option 'gama' (did you mean 'gamma'?)"
    )
    assert said(add, {"type": "EMAHook", "momentum": "fast"}) == "hooks[0].momentum: expected float, got str 'fast'"
    assert add({"type": "Forwards", "p": 0.25})[0].made.p == 0.25


def test_a_registered_user_average_is_an_ema_type_in_python():
    @register(name="mine_for_ema")
    class Mine(ExponentialMovingAverage):
        pass

    assert add({"type": "EMAHook", "ema_type": "mine_for_ema"})[0]._type is Mine
    assert EMAHook("mine_for_ema")._type is Mine


def test_signals_are_given_by_name():
    hook = add({"type": "PreemptionHook", "signals": ["SIGTERM", "SIGUSR1"]})[0]
    assert [one.name for one in hook.signals] == ["SIGTERM", "SIGUSR1"]


# -------------------------------------------------------------------------------------------- what is wrong, and where


def option(**options):
    return {"type": "Everything", **options}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (option(number="ten"), ".number: expected int, got str 'ten'"),
        (option(number=True), ".number: expected int, got bool True"),
        (option(number=None), ".number: expected int, got null"),
        (option(choice="A"), ".choice: expected 'a' | 'b', got str 'A' (did you mean 'a'?)"),
        (option(names="abc"), ".names: expected list of str, got str 'abc'"),
        (option(pair=[1]), ".pair: expected a list of 2, got one of 1"),
        (option(pair=[1, "x"]), ".pair[1]: expected float, got str 'x'"),
        (option(table={"x": 1, "y y": "z"}), ".table.\"y y\": expected int, got str 'z'"),
        (option(function=3), ".function: expected function | None, got int 3"),
        (option(console="Console"), ".console: 'Console' is not of the form module:attribute"),
        (option(writer={"typ": "ConsoleWriter"}), ".writer.type: is missing (is 'typ' misspelt?)"),
        (option(writer="Console"), ".writer: 'Console' is not a registered writer (did you mean 'ConsoleWriter'?)"),
        (option(writers={"main": {"type": "JSONLinesWriter", "intervall": 1}}), ".writers.main.intervall: JSONLinesWriter"),
        (option(numbr=3), ".numbr: Everything has no option 'numbr' (did you mean 'number'?)"),
        (option(priority="NORML"), ".priority: priority='NORML' is not a priority name (did you mean 'NORMAL'?)"),
        (option(level="VERY_LOW"), ".level: priority='VERY_LOW' is not a priority name (did you mean 'LOW'?)"),
        (option(level="LOW", priority=3), ".level: priority is given, too"),
        (option(name=3), ".name: expected str, got int 3"),
        (
            {"type": "CheckInvalidLossHook", "zzz": 1},
            ".zzz: CheckInvalidLossHook has no option 'zzz'; its options are interval, keys, type, priority, level, name",
        ),
        (3, ": expected a table with the type of a hook, or its name, got int 3"),
        ({"tpye": "EMAHook"}, ".type: is missing (is 'tpye' misspelt?)"),
        ("EMAHok", ".type: 'EMAHok' is not a registered hook (did you mean 'EMAHook'"),
        ({"type": ConsoleWriter}, ".type: expected a class derived from Hook, got <class"),
        ({"type": 3}, ".type: expected a class derived from Hook, got int 3"),
        ({"type": "ParamSchedulerHook", "scheduler": 1}, ".scheduler: expected Scheduler | list of Scheduler"),
    ],
)
def test_the_error_for_an_entry_has_position_expectation_and_suggestion(entry, expected):
    told = said(add, "EMAHook", {"type": "LoggerHook"}, entry)
    assert told.startswith(f"hooks[2]{expected}"), told


def test_all_are_added_or_none(bus):
    with pytest.raises(ConfigurationError):
        add_hooks(bus, ["EMAHook", "LoggerHook", "EMAHok"])
    with pytest.raises(SubscribeError, match="'EMAHook'"):
        add_hooks(bus, ["EMAHook", "EMAHook"])
    assert bus.hooks == ()
    assert bus.subscriptions == ()


def test_errors_of_a_constructor_have_the_position():
    class Fails(Hook):
        def __init__(self):
            raise ZeroDivisionError("oh")

        def after_run(self, event):
            pass

    with pytest.raises(ZeroDivisionError) as caught:
        add({"type": Fails})
    assert caught.value.__notes__ == ["while making Fails for hooks[0]"]


def test_the_configuration_is_not_changed():
    table = {"type": "LoggerHook", "priority": "LOW", "name": "x", "writers": [{"type": "JSONLinesWriter", "interval": 1}]}
    before = repr(table)
    add(table)
    assert repr(table) == before
