"""Options of constructors, checked against their annotations."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from msgspec import Meta

from trainbus.eventloop import ConfigurationError, check_options


class Thing:
    @check_options
    def __init__(
        self,
        count: Annotated[int, Meta(ge=1)] = 1,
        flag: bool = True,
        *,
        share: Annotated[float, Meta(gt=0, lt=1)] | None = None,
        name: Annotated[str, Meta(min_length=1, description="a name")] = "thing",
        mode: Literal["raise", "log"] = "raise",
        place: str | Path | None = None,
        keys: Sequence[str] = (),
        table: Mapping[str, Any] | Callable[[], Any] | None = None,
        **further: Any,
    ) -> None:
        self.given = (count, flag, share, name, mode, place, keys, table, further)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": "3"}, "count='3': give an integer of at least 1"),
        ({"count": 0}, "count=0: give an integer of at least 1"),
        ({"count": True}, "count=True: give an integer of at least 1"),
        ({"flag": "no"}, "flag='no': give True or False"),
        ({"flag": 1}, "flag=1: give True or False"),
        ({"share": 1.0}, "share=1.0: give a number above 0 and below 1, or None"),
        ({"share": float("nan")}, "share=nan: give a number above 0 and below 1, or None"),
        ({"name": ""}, "name='': give a name"),
        ({"mode": "warn"}, 'mode=\'warn\': give "raise" or "log"'),
        ({"place": 3}, "place=3: give a text, or a Path, or None"),
        ({"keys": {"a": 1}}, "keys={'a': 1}: give a list"),
        ({"keys": "abc"}, "keys='abc': give a list"),
        ({"table": 3}, "table=3: give a mapping, or a function, or None"),
    ],
)
def test_a_value_that_violates_the_annotation_is_an_error_with_advice(options, said):
    with pytest.raises(ConfigurationError) as caught:
        Thing(**options)
    assert str(caught.value) == said


def test_valid_values_are_passed_unchanged():
    given = {"count": 2, "share": np.float64(0.5), "place": Path("x"), "keys": ["a"], "table": dict, "other": object()}
    taken = (2, True, given["share"], "thing", "raise", Path("x"), ["a"], dict, {"other": given["other"]})
    assert Thing(**given).given == taken
    assert type(Thing(share=given["share"]).given[2]) is np.float64


def test_positional_arguments_are_checked_and_the_signature_is_kept():
    with pytest.raises(ConfigurationError, match="flag='yes'"):
        Thing(1, "yes")
    assert list(inspect.signature(Thing).parameters)[:2] == ["count", "flag"]


def test_a_missing_argument_is_pythons_own_error_and_an_unknown_one_is_answered_with_the_nearest():
    class Needy:
        @check_options
        def __init__(self, count: int) -> None: ...

    with pytest.raises(TypeError, match="'count'"):
        Needy()
    with pytest.raises(ConfigurationError, match=r"Needy.*cuont=.*count="):
        Needy(cuont=3)
    with pytest.raises(ConfigurationError, match=r"Needy.*every=.*count"):
        Needy(every=3)

    class Poor(Needy): ...

    with pytest.raises(ConfigurationError, match=r"Poor.*cuont="):
        Poor(cuont=3)


def test_a_name_of_positional_arguments_is_no_option():
    class Several:
        @check_options
        def __init__(self, *things: int, count: int = 1) -> None: ...

    Several(1, 2, count=3)
    with pytest.raises(ConfigurationError, match=r"Several.*things=.*count"):
        Several(things=[1, 2])


def test_a_constructor_that_takes_any_keyword_gets_it():
    class Loose:
        @check_options
        def __init__(self, count: int = 1, **rest: object) -> None:
            self.rest = rest

    assert Loose(cuont=3).rest == {"cuont": 3}


def test_an_annotation_may_have_marks_that_cannot_be_hashed():
    class Marked:
        @check_options
        def __init__(self, count: Annotated[int, ["a note"], Meta(ge=1)] = 1) -> None: ...

    Marked(2)
    with pytest.raises(ConfigurationError, match="count=0"):
        Marked(0)
