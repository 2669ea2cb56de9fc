"""``trainbus hooks NAME``: one hook with what its options do."""

import json
import re

import pytest

from trainbus import hooks  # noqa: F401 - registers what is offered
from trainbus.config import option_descriptions
from trainbus.eventloop.annotations import Signature
from trainbus.eventloop.registry import registered

KINDS = ("hook", "writer", "average")
OFFERED = [one for kind in KINDS for one in registered(kind) if one.cls.__module__.partition(".")[0] == "trainbus"]


@pytest.mark.parametrize("entry", OFFERED, ids=[entry.name for entry in OFFERED])
def test_every_option_has_a_description(entry):
    described = option_descriptions(entry.cls)
    assert [name for name in Signature(entry.cls).options if not described.get(name)] == []


def test_one_hook_is_shown_with_the_type_default_and_description_of_each_option(trainbus, here):
    shown = trainbus("hooks", "CheckpointHook").out
    assert "interval: int = -1\n    epochs or iterations between saves; -1 for none." in shown
    assert "before_train" in shown
    assert "``" not in shown
    assert ":class:" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", ["JSONLinesWriter", "StochasticWeightAverage"])
def test_writers_and_averages_are_shown_too(trainbus, name):
    out = trainbus("hooks", name).out
    assert out.startswith(f"{name}\n")
    assert name in out.splitlines()[-1]  # how to use it


@pytest.mark.parametrize("command", ["hooks", "events"])
def test_a_list_fits_80_columns_has_no_escape_codes_and_ends_with_what_to_do_next(trainbus, here, command):
    out = trainbus(command).out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert out.splitlines()[-1].startswith(f"next: trainbus {command} NAME")


@pytest.mark.parametrize("name", ["after_train_iter", "AfterTrainIter"])
def test_one_event_is_explained_with_its_fields_and_place_in_a_run(trainbus, name):
    out = trainbus("events", name).out
    assert "after_train_iter (AfterTrainIter)" in out
    assert "after_forward → after_train_iter → before_backward" in out
    assert re.search(r"^batch +live: not for offloaded handlers", out, re.MULTILINE)
    assert '@bus.on("after_train_iter")' in out
    assert json.loads(trainbus("events", name, "--json").out).keys() == {"after_train_iter"}


def test_a_group_of_events_is_explained_with_those_in_it_and_a_misspelt_one_with_the_near_names(trainbus):
    assert "before_train_iter, before_val_iter" in trainbus("events", "before_iter").out
    assert "after_train_iter" in trainbus("events", "aftr_train_iter", status=2).err
