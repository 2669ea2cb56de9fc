"""Anyone's loop is exact, or tells: programs that a grammar writes, killed and resumed, against the same without trainbus."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, reject, seed, settings
from torch import nn

from .conftest import CHUNK
from .grammar import programs
from .kit import Kept, Said, Strike, left
from .tells import excused
from .trials import ControlError, compiled, lived_in_process, tried

OPTIONS = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
SHORT = 40


def check(program, folder, live=None) -> None:
    """Try a program in an empty folder; AssertionError if it is neither exact nor tells why it is not."""
    shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        try:
            verdict = tried(compiled(program.source()), program.strikes, folder, again=program.again, live=live)
        except ControlError:
            reject()  # it fails without trainbus, too
    if verdict.exact:
        event(f"exact, {verdict.lives} lives")
    elif reason := excused(program, verdict):
        event(f"told: {reason}")
    else:
        pytest.fail(f"{verdict}\n\n{program.source()}", pytrace=False)


@pytest.fixture(autouse=True)
def _one_thread_and_no_hook_of_torch_stays():
    states = torch.get_rng_state()
    yield
    torch.set_rng_state(states)


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("loops")


def forgetful(tb, strike, folder):
    """A program that counts its batches in a value that is in no checkpoint."""
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    optimizer, counted = torch.optim.SGD(net.parameters(), lr=0.1), Kept()
    bus = tb.Bus(tb.CheckpointHook(interval=1))
    with tb.Run(bus, model=net, optimizer=optimizer, work_dir=folder, stateful={}, resume="auto") as run:
        strike.run = run
        for _ in run.epochs(3):
            for batch in run.train([torch.ones(1, 1)]):
                strike(0)
                optimizer.zero_grad()
                net(batch).sum().backward()
                optimizer.step()
                counted["batches"] += 1
    return left(run, Said(folder), net=net, counted=counted)


def test_a_program_that_forgets_a_value_is_found(folder):
    assert tried(forgetful, [], folder / "unstruck").exact
    assert tried(forgetful, [Strike("die", 0, 2)], folder / "struck").differences == ["counted.batches: 3, then 2"]


@pytest.mark.long
def test_forty_programs_are_exact_or_tell(folder):
    # Without shrinking, which takes minutes: the long form does it.
    @settings(max_examples=SHORT, derandomize=True, phases=[Phase.generate], **OPTIONS)
    @given(programs())
    def one(program):
        check(program, folder)

    one()


@pytest.mark.loops
@pytest.mark.timeout(3600)
def test_programs_are_exact_or_tell(chunk, folder, request):
    without, also = ([*filter(None, request.config.getoption(name).split(","))] for name in ("--without", "--also"))

    @seed(chunk)
    @settings(max_examples=CHUNK, phases=[Phase.generate, Phase.shrink], **OPTIONS)
    @given(programs(without, also))
    def one(program):
        check(program, folder)

    one()


@pytest.mark.loops
@pytest.mark.timeout(3600)
def test_killed_processes_are_exact_or_tell(chunk, folder):
    @seed(chunk)
    @settings(max_examples=5, phases=[Phase.generate], **OPTIONS)
    @given(programs(without=["stop", "thread", "term"]))
    def one(program):
        killed = replace(program, strikes=tuple(strike._replace(kind="kill") for strike in program.strikes))
        check(killed, folder, live=partial(lived_in_process, killed.source()))

    one()
