"""Options derived from signatures, and that defaults survive the way through text."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NewType, TypedDict

import msgspec
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainbus.config.make import Maker
from trainbus.config.names import Imports
from trainbus.eventloop import Hook
from trainbus.eventloop.annotations import Signature
from trainbus.eventloop.registry import registered

if TYPE_CHECKING:
    from decimal import Decimal

BUILTIN = [
    entry.cls
    for kind in ("hook", "writer", "average")
    for entry in registered(kind)
    if entry.cls.__module__.startswith("trainbus.")
]


def plain(value):
    """Lists and tuples are the same in text."""
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def written(signature):
    """The defaults as a configuration writes them: a class by its name, a path as text."""
    defaults = {name: option.default for name, option in signature.options.items() if option.default is not option.empty}
    for name, value in defaults.items():
        is_class = isinstance(value, type)
        defaults[name] = f"{value.__module__}:{value.__qualname__}" if is_class else msgspec.to_builtins(value, enc_hook=str)
    return defaults


@pytest.mark.parametrize("codec", [(json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)], ids=["json", "yaml"])
@given(st.data())
def test_any_choice_of_a_hooks_defaults_round_trips_through_text(codec, data):
    encode, decode = codec
    signature = Signature(data.draw(st.sampled_from(BUILTIN), label="class"))
    defaults = written(signature)
    chosen = data.draw(st.sets(st.sampled_from(sorted(defaults))) if defaults else st.just(set()), label="options")
    read = decode(encode({name: defaults[name] for name in chosen}))
    named = Maker(Imports(["trainbus.hooks"])).decode(signature, read, "")
    assert {name: plain(value) for name, value in named.items()} == {
        name: plain(signature.options[name].default) for name in chosen
    }


def test_options_come_from_the_current_signature():
    class Changing(Hook):
        def __init__(self, one: int = 1):
            pass

    assert list(Signature(Changing).options) == ["one"]
    Changing.__init__ = lambda self, two=2: None
    assert list(Signature(Changing).options) == ["two"]


def test_an_unresolvable_annotation_does_not_affect_others():
    def function(amount: "Decimal", count: "int" = 3):
        return amount, count

    assert Signature(function).options["count"].annotation is int
    assert Maker().call(Signature(function), {"amount": "x", "count": 4}, "here") == ("x", 4)


@pytest.mark.parametrize("target", [dict, print, type("Plain", (), {})])
def test_classes_without_signature_or_options_can_be_made(target):
    assert Signature(target).label in ("dict", "print", "Plain")
    assert Maker().call(Signature(target), {}, "here") is not False


def test_positional_only_parameters_are_given_by_name_in_a_configuration():
    def function(one: int, /, two: int) -> Any:
        return one, two

    assert Maker().call(Signature(function), {"two": 2, "one": 1}, "here") == (1, 2)


@dataclass(frozen=True)
class Policy:
    dtype: torch.dtype | None = None
    scale: float = 1.0


class Limits(TypedDict):
    low: int


Name = NewType("Name", str)
PARTS = "parts_of_signature_tests"


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (Policy, {"scale": 2}, Policy(scale=2.0)),
        (Policy | None, {"type": f"{PARTS}:Policy", "dtype": "torch:float16"}, Policy(torch.float16)),
        (Policy, Policy(scale=3.0), Policy(scale=3.0)),
        (Limits, {"low": 3}, {"low": 3}),
        (Name, "x", "x"),
        (Annotated[int | None, "of something"], 3, 3),
    ],
)
def test_records_new_types_and_annotated_types_are_options(monkeypatch, annotation, value, expected):
    def function(option):
        return option

    function.__annotations__ = {"option": annotation}
    monkeypatch.setitem(sys.modules, PARTS, sys.modules[__name__])
    assert Maker(Imports([PARTS, "torch"])).call(Signature(function), {"option": value}, "here") == expected
