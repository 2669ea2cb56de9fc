"""Options derived from signatures: the structs, and that defaults survive the way through text."""

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eventloop import Hook
from eventloop.config import Imports, Maker, Options, registered
from hooks import CheckpointHook, EMAHook, LoggerHook

if TYPE_CHECKING:
    from decimal import Decimal

BUILTIN = [
    entry.cls
    for kind in ("hook", "writer", "average")
    for entry in registered(kind)
    if entry.cls.__module__.startswith("hooks")
]


def plain(value):
    """Lists and tuples are the same in text."""
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("codec", [(json.dumps, json.loads), (yaml.safe_dump, yaml.safe_load)], ids=["json", "yaml"])
@given(st.data())
def test_any_choice_of_a_hooks_defaults_round_trips_through_text_and_its_struct(codec, data):
    encode, decode = codec
    options = Options(data.draw(st.sampled_from(BUILTIN), label="class"))
    written = options.defaults()
    assert written.keys() == {name for name, option in options.known.items() if not option.required}
    chosen = data.draw(st.sets(st.sampled_from(sorted(written))) if written else st.just(set()), label="options")
    read = decode(encode({name: written[name] for name in chosen}))
    _, named = Maker().decode(options, read, "", partly=True)
    assert {name: plain(value) for name, value in named.items()} == {
        name: plain(options.known[name].default) for name in chosen
    }


@pytest.mark.parametrize("cls", [cls for cls in BUILTIN if not any(one.required for one in Options(cls).known.values())])
def test_a_hooks_struct_has_its_defaults_and_is_what_msgspec_decodes(cls):
    struct = Options(cls).struct
    made = struct()
    assert msgspec.json.decode(msgspec.json.encode(made), type=struct) == made


@pytest.mark.parametrize(
    ("cls", "options", "said"),
    [
        (CheckpointHook, {"interval": "x"}, r"Expected `int`, got `str` - at `\$.interval`"),
        (CheckpointHook, {"save_best": [1]}, r"Expected `str`, got `int` - at `\$.save_best\[0\]`"),
        (LoggerHook, {"intervall": 1}, "unknown field `intervall`"),
    ],
)
def test_a_struct_by_itself_refuses_what_the_hook_does_not_take(cls, options, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(options, Options(cls).struct)


def test_options_come_from_the_hooks_own_signature_as_it_is_now():
    class Changing(Hook):
        def __init__(self, one: int = 1):
            pass

    assert list(Options(Changing).known) == ["one"]
    Changing.__init__ = lambda self, two=2: None
    assert list(Options(Changing).known) == ["two"]


def test_an_annotation_that_cannot_be_resolved_spoils_no_other():
    def function(amount: "Decimal", count: "int" = 3):
        return amount, count

    assert Options(function).known["count"].annotation is int
    assert Maker().call(function, {"amount": "x", "count": 4}, "here") == ("x", 4)


@pytest.mark.parametrize("target", [dict, print, type("Plain", (), {})])
def test_what_has_no_signature_or_no_options_can_be_made_too(target):
    assert Options(target).label in ("dict", "print", "Plain")
    assert Maker().call(target, {}, "here") is not False


def test_positional_only_parameters_are_given_by_name_in_a_configuration():
    def function(one: int, /, two: int) -> Any:
        return one, two

    assert Maker().call(function, {"two": 2, "one": 1}, "here") == (1, 2)


def test_defaults_are_written_as_a_configuration_would():
    written = Options(EMAHook).defaults()
    assert written["ema_type"] == "ExponentialMovingAverage"
    assert written["strict_load"] is False

    def function(kind: type = json.JSONEncoder):
        return kind

    assert Options(function).defaults() == {"kind": "json.encoder:JSONEncoder"}
    named = Maker(Imports(["json"])).decode(Options(function), Options(function).defaults(), "")[1]
    assert named == {"kind": json.JSONEncoder}
