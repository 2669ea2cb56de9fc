"""Loops in the shapes of others: they learn, and a killed run ends with the weights of an uninterrupted one."""

import json
import signal

import pytest
import torch

from trainbus import Hook
from trainbus.eventloop import RunPreempted


class Kill(Hook):
    """Kills the run in an iteration, after its handlers and before its save."""

    priority = 80

    def __init__(self, at):
        self.at = at

    def after_train_iter(self, event):
        if event.progress.iter + 1 == self.at:
            raise KeyboardInterrupt


def learned(name, found):
    match name:
        case "ppo":  # the share of episodes that reached the goal
            return sum(found[-5:]) / 5 > 0.9 > found[0]
        case "dqn":  # lengths of episodes
            return sum(found[-20:]) / 20 < 15 < sum(found[:10]) / 10
        case "callback_trainer":  # the loss of a batch
            return found < 0.3
        case "hook_trainer":  # the accuracy of a validation
            return found > 0.9
        case _:  # the loss of a validation
            return found < 2.0


@pytest.mark.parametrize(
    ("name", "kill", "length"),
    [
        pytest.param("ppo", 14, 20, marks=pytest.mark.long),
        pytest.param("dqn", 955, 1500, marks=pytest.mark.long),
        ("tiny_gpt", 51, 60),
        ("callback_trainer", 109, 200),
        ("hook_trainer", 83, 120),
    ],
)
def test_it_learns_and_a_killed_run_ends_with_the_same_weights(example, tmp_path, name, kill, length):
    train = example(name).train
    whole, found = train(tmp_path / "whole")
    assert learned(name, found)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", [Kill(kill)])
    resumed, again = train(tmp_path / "killed")
    assert again == found
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "scalars.jsonl").read_text().splitlines()]
    assert lines[-1]["iter"] == length


class Signal(Hook):
    """Sends this process the signal of a scheduler in an iteration."""

    def __init__(self, at):
        self.at = at

    def after_train_iter(self, event):
        if event.progress.iter + 1 == self.at:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("name", "at"), [("callback_trainer", 107), ("hook_trainer", 90)])
def test_a_loop_of_calls_ends_with_its_status_at_a_signal_and_goes_on_with_the_same_weights(example, tmp_path, name, at):
    train = example(name).train
    whole, found = train(tmp_path / "whole")
    with pytest.raises(RunPreempted) as preempted:
        train(tmp_path / "stopped", [Signal(at)])
    assert preempted.value.code == 75
    resumed, again = train(tmp_path / "stopped")
    assert again == found
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
