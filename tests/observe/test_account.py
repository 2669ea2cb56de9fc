"""The account of time, against a slow and obvious one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainbus.eventloop.measure.spans import BEGIN, END, FIELDS, NAME
from trainbus.observe.account import MOST_BETWEEN, MOST_PENDING, Account, exclusive


def tree(draw, begin: int, end: int, depth: int) -> list[tuple[int, int, int]]:
    """Spans within begin and end, (name, begin, end), nested or apart, in the order of their ends."""
    rows = []
    at = begin
    while at < end and draw(st.booleans()):
        first = draw(st.integers(at, end - 1))
        last = draw(st.integers(first + 1, end))
        if depth:
            rows += tree(draw, first, last, depth - 1)
        rows.append((draw(st.integers(0, 4)), first, last))
        at = last
    return rows


@st.composite
def forests(draw) -> list[tuple[int, int, int]]:
    return tree(draw, 0, draw(st.integers(1, 60)), 3)


def array(rows) -> np.ndarray:
    spans = np.zeros((len(rows), FIELDS), np.int64)
    spans[:, [NAME, BEGIN, END]] = np.array(rows, np.int64).reshape(-1, 3)
    return spans


@given(forests())
def test_exclusive_times_are_those_of_the_innermost_span_at_each_instant(rows):
    expected: Counter[int] = Counter()
    for instant in range(61):
        # Of the spans at this instant the shortest is the innermost; of equal ones, the first that was noted.
        around = [(end - begin, index) for index, (_, begin, end) in enumerate(rows) if begin <= instant < end]
        if around:
            expected[min(around)[1]] += 1
    assert exclusive(array(rows)).tolist() == [expected[index] for index in range(len(rows))]


HANDLERS = ("handler one", "handler two")


class Made:
    """A run as spans, instant by instant: each costs a time that hypothesis draws."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.now = 1000
        self.rows: list[tuple[str, int, int]] = []
        self.expected: Counter[str] = Counter()
        self.wall = 0
        self.steps: list[int] = []
        self.cut = False  # a validation was left, by a break or a stop, which nothing tells

    def spend(self, what: str) -> None:
        what = "validation" if self.cut and what in ("waiting for data", "between epochs", "rest") else what
        spent = self.draw(st.integers(1, 9))
        self.now += spent
        self.wall += spent
        self.expected[what] += spent

    def event(self, name: str) -> None:
        self.cut = False
        began = self.now
        self.spend(name)
        for handler in self.draw(st.lists(st.sampled_from(HANDLERS), max_size=2)):
            started = self.now
            self.spend(handler)
            self.rows.append((handler, started, self.now))
            self.spend(name)
        self.rows.append((name, began, self.now))

    def inner(self, first: str, last: str, part: str, around: str) -> None:
        self.event(first)
        self.spend(part)
        self.event(last)
        self.spend(around)

    def iteration(self, last: int) -> int:
        self.spend("waiting for data")
        self.event("before_train_iter")
        self.spend("step")
        self.inner("before_forward", "after_forward", "forward", "step")
        self.event("after_train_iter")
        self.steps.append(self.now - last)
        return self.now

    def validation(self, around: str) -> None:
        self.spend(around)
        self.event("before_val")
        self.spend("validation")
        self.event("after_val_iter")
        self.spend("validation")
        self.cut = self.draw(st.booleans())
        if not self.cut:
            self.event("after_val")

    def run(self) -> None:
        self.now += 50  # not of a run
        self.event("before_run")
        self.spend("rest")
        self.event("before_train")
        self.spend("rest")
        for _ in range(self.draw(st.integers(0, 3))):
            self.event("before_train_epoch")
            last = self.now
            for _ in range(self.draw(st.integers(0, 4))):
                last = self.iteration(last)
                if self.draw(st.booleans()):
                    self.validation("waiting for data")
                    last = self.now
            self.spend("waiting for data")
            if self.draw(st.integers(0, 9)) == 0:
                self.event("on_exception")
                self.now += 7  # the run ends, and nothing tells when
                return
            self.event("after_train_epoch")
            if self.draw(st.booleans()):
                self.validation("between epochs")
            self.spend("between epochs")
        self.event("after_train")
        self.spend("rest")
        self.event("after_run")


@pytest.mark.long
@given(st.data())
def test_the_account_is_that_of_a_run_however_its_spans_come_in_batches(data):
    made = Made(data.draw)
    for _ in range(data.draw(st.integers(1, 2))):
        made.run()
    names: dict[str, int] = {}
    account = Account(lambda name: names.setdefault(name, len(names)), list)
    rows = array([(names.setdefault(name, len(names)), begin, end) for name, begin, end in made.rows])
    at = 0
    while at < len(rows):
        size = data.draw(st.integers(1, 40))
        account.add(rows[at : at + size])
        at += size
    spent = {name: account.spent(number) for name, number in names.items()}
    assert account.wall == made.wall
    spent["rest"] = account.wall - sum(spent.values())
    assert {name: time for name, time in spent.items() if time} == dict(made.expected)
    assert account.steps.total() == len(made.steps)


def test_pending_spans_are_bounded(change):
    change(MOST_PENDING, 100)
    change(MOST_BETWEEN, 100)
    names: dict[str, int] = {}
    account = Account(lambda name: names.setdefault(name, len(names)), list)
    numbers = {name: names.setdefault(name, len(names)) for name in ("before_run", "before_train_iter", "busy", "after_run")}
    account.add(array([(numbers["before_run"], 0, 1), (numbers["before_train_iter"], 2, 3)]))
    for begin in range(3, 1003, 2):
        account.add(array([(numbers["busy"], begin, begin + 1)]))
        assert len(account._pending) <= 101
    assert account.spent(numbers["busy"]) + account.spent(names["step"]) == account.wall - 3
    account.add(array([(numbers["after_run"], 1003, 1004)]))
    wall = account.wall
    for begin in range(2000, 3000):  # a thread that lives on after its training
        account.add(array([(numbers["busy"], begin, begin + 1)]))
    assert account.wall == wall
    assert len(account._pending) <= 101
