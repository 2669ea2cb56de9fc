import pytest

from eventloop import Priority, SubscribeError
from hooks.compat.imix import imix_priority

IMIX = {"HIGHEST": 0, "HIGHER": 10, "HIGH": 20, "NORMAL": 30, "LOW": 40, "LOWER": 50, "LOWEST": 60}


@pytest.mark.parametrize(("name", "number"), IMIX.items())
def test_the_names_of_imix_have_a_scale_of_their_own(name, number):
    assert imix_priority(name) == imix_priority(name.lower()) == number


def test_names_that_only_the_other_scale_has_are_refused():
    with pytest.raises(SubscribeError, match="'VERY_HIGH' is not a priority name"):
        imix_priority("VERY_HIGH")
    assert Priority.parse("VERY_HIGH") == 10
