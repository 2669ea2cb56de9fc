"""Each warning and error of the log has an id of its own."""

import re
import sys
from collections import Counter

from .docs.pages import DOCS

sys.path.insert(0, str(DOCS / "_site"))
try:
    import log_ids
finally:
    del sys.path[0]

LINES = list(log_ids.lines())


def test_each_warning_has_an_id():
    without = [f"{one.module}:{one.number}" for one in LINES if not one.id]
    assert not without
    assert len(LINES) > 150


def test_ids_are_unique_and_in_kebab_case():
    counts = Counter(one.id for one in LINES)
    assert [name for name, count in counts.items() if count > 1 or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
