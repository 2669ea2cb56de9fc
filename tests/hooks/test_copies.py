"""Copies of hooks and writers, made by ``copy`` and ``pickle``: new ones, and such that are in a run or had one."""

import copy
import pickle

import pytest
from torch import nn

from trainbus.eventloop.bus import GuestHook
from trainbus.eventloop.registry import registered
from trainbus.hooks import EMAHook, ExponentialMovingAverage, JSONLinesWriter, LoggerHook, Writer
from trainbus.observe import AlertHook

from .conftest import batches, make_loop
from .test_options import required_of
from .writers.conftest import NEEDS


def catalogue():
    kinds = [entry.cls for kind in ("hook", "writer") for entry in registered(kind)]
    return [kind for kind in kinds if kind.__module__.startswith("trainbus.") and not issubclass(kind, GuestHook)]


def made(kind):
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    quick = {"end_timeout": 0.1} if kind is AlertHook else {}  # nothing listens there
    return kind(**required_of(kind), **quick)


def copies(one):
    return [copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]  # noqa: S301 - our own


def train(folder, *used, each_iteration=None):
    added = (LoggerHook(1, writers=[one]) if isinstance(one, Writer) else one for one in used)
    loop = make_loop(*added, train_data=batches(2), max_epochs=1, work_dir=folder)
    loop.bus.on("after_train_iter", lambda event: each_iteration and each_iteration(), priority=90)
    loop.run()


@pytest.mark.long
@pytest.mark.parametrize("kind", catalogue())
def test_each_can_be_copied(kind):
    for one in copies(made(kind)):
        assert type(one) is kind


ELSEWHERE = ("MLflowWriter", "WandbWriter", "RayTrainHook")  # these need a server, or a worker of Ray
RUN = [kind for kind in catalogue() if getattr(kind, "of_run", {}) and kind.__name__ not in ELSEWHERE]


@pytest.mark.long
@pytest.mark.parametrize("kind", RUN)
def test_the_copy_of_one_in_a_run_has_a_run_of_its_own(kind, tmp_path):
    one, found = made(kind), []
    train(tmp_path / "first", one, each_iteration=lambda: found.extend(copies(one)))
    for number, other in enumerate([*found[:3], *copies(one)]):
        train(tmp_path / f"copy{number}", other)
        files = {path.name for path in (tmp_path / "first").rglob("*") if "tfevents" not in path.name}
        assert files == {path.name for path in (tmp_path / f"copy{number}").rglob("*") if "tfevents" not in path.name}


def test_a_copied_logger_has_the_options_and_writes_its_own_lines(tmp_path):
    one = LoggerHook(1, writers=[JSONLinesWriter("mine.jsonl")])
    for name, logger in (("first", one), ("second", copy.deepcopy(one))):
        train(tmp_path / name, logger)
        assert len((tmp_path / name / "mine.jsonl").read_text().splitlines()) == 2


def test_an_average_names_the_way_to_another_model():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"load average\.state_dict"):
        copy.deepcopy(ExponentialMovingAverage(model))
    assert copy.deepcopy(EMAHook(momentum=0.5)).average is None
