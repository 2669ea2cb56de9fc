"""The order of a run is one table: the driver goes where it says, and its module needs neither torch nor a bus."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainbus.eventloop import Bus, Run, mount_points
from trainbus.eventloop.events.event import resolve
from trainbus.eventloop.training import Scope, machine
from trainbus.eventloop.training.machine import TURNS

INSIDE = {
    "optimizer_step",
    "module_forward",
    "module_backward",
    "forward",
    "backward",
    "save_checkpoint",
    "load_checkpoint",
    "checkpoint",
}
"""Other things than scopes that events come before and behind."""


@given(st.data())
def test_each_call_publishes_and_goes_where_the_table_says(parts, data):
    bus = Bus()
    trace = parts.Trace(bus)
    run = Run(bus, model=parts.model())
    drive, around = run.drive(), []
    try:
        for _ in range(data.draw(st.integers(1, 30))):
            scope, seen = drive.scope, len(trace.events)
            call = data.draw(st.sampled_from([call for here, call in TURNS if here is scope]))
            name, *stage = call.split()
            if name == "begin_evaluation":
                around.append(scope)
            getattr(drive, name)(*stage)
            turn = TURNS[scope, call]
            assert [type(event) for event in trace.events[seen:]] == [*turn.events]
            assert drive.scope is (around.pop() if turn.to is Scope.AROUND else turn.to)
    finally:
        if drive.scope is not Scope.CLOSED:
            drive.fail(ZeroDivisionError())


def test_every_event_around_a_scope_is_in_the_table():
    names = {name for name in mount_points() if name.startswith(("before_", "after_"))}
    around = {resolve(name) for name in names if name.partition("_")[2] not in INSIDE}
    assert around == {event for turn in TURNS.values() for event in turn.events}


def test_the_table_needs_neither_torch_nor_a_bus():
    nodes = ast.walk(ast.parse(Path(machine.__file__).read_text()))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {name.removeprefix("trainbus.").removeprefix("eventloop.") for name in modules if name.startswith("trainbus")}
    assert ours == {"eventloop", "errors", "events", "log", "training.schema"}
    assert not {name for name in modules if name.startswith("torch")}


@pytest.mark.parametrize("scope", [one for one in Scope if one is not Scope.AROUND])
def test_each_scope_can_be_left(scope):
    """By calls of the table, a run comes from any scope to its end."""
    seen, front = set(), {scope}
    while front:
        seen |= front
        after = {turn.to for (here, _), turn in TURNS.items() if here in front}
        front = (after | ({Scope.RUN} if Scope.AROUND in after else set())) - seen
    assert Scope.CLOSED in seen
