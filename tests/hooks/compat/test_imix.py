import pytest

from eventloop import Priority, SubscribeError
from hooks.compat.imix import imix_priority

IMIX = {"HIGHEST": 0, "HIGHER": 10, "HIGH": 20, "NORMAL": 30, "LOW": 40, "LOWER": 50, "LOWEST": 60}


@pytest.mark.parametrize(("name", "number"), IMIX.items())
def test_imix_priority_names_have_their_own_scale(name, number):
    assert imix_priority(name) == imix_priority(name.lower()) == number


def test_priority_names_of_trainbus_are_refused_on_the_imix_scale():
    with pytest.raises(SubscribeError, match="VERY_HIGH"):
        imix_priority("VERY_HIGH")
    assert Priority.parse("VERY_HIGH") == 10
