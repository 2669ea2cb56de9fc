import re

import pytest

from trainbus.eventloop import Priority, SubscribeError

MMENGINE = {
    "HIGHEST": 0, "VERY_HIGH": 10, "HIGH": 30, "ABOVE_NORMAL": 40, "NORMAL": 50, "BELOW_NORMAL": 60, "LOW": 70, "VERY_LOW": 90,
    "LOWEST": 100,
}  # fmt: skip


def test_names_have_the_numbers_of_mmengine_in_any_case():
    assert {name: int(member) for name, member in Priority.__members__.items()} == MMENGINE
    for spelt in (str.upper, str.lower, str.title):
        assert {name: Priority.parse(spelt(name)) for name in MMENGINE} == MMENGINE


def test_names_of_a_given_scale_are_accepted():
    assert Priority.parse("lower", {"LOWER": 50}) == 50
    with pytest.raises(SubscribeError, match=r"'HIGH'.* LOWER"):
        Priority.parse("HIGH", {"LOWER": 50})


@pytest.mark.parametrize("number", [0, 1, 55, 100, Priority.LOW])
def test_integers_from_0_to_100_are_accepted(number):
    parsed = Priority.parse(number)
    assert parsed == number
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *((value, f"priority={value!r}") for value in (-1, 101, True, 1.5, None, [50])),
        ("LOWER", "'LOWER'"),  # a name of imix is not guessed
        ("VERY_HGH", "VERY_HIGH"),
    ],
)
def test_what_is_no_priority_is_refused_and_named(value, named):
    with pytest.raises(SubscribeError, match=re.escape(named)):
        Priority.parse(value)


def test_labels_name_the_slot_and_the_distance_to_it():
    assert Priority.label(50) == "NORMAL"
    assert Priority.label(55) == "NORMAL+5"
    assert Priority.label(20) == "VERY_HIGH+10"
    assert Priority.label(100) == "LOWEST"
