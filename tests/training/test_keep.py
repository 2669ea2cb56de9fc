"""``run.keep()``: values of the user's loop come back where a run was killed."""

import copy
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trainbus.eventloop import Bus, ConfigurationError, Run, TrainingError
from trainbus.eventloop.checkpoint import load
from trainbus.hooks import CheckpointHook


class Buffer:
    """An object with a state of its own."""

    def __init__(self):
        self.rows, self.at = np.zeros(8), 0

    def add(self, value):
        self.rows[self.at % 8] = value
        self.at += 1

    def state_dict(self):
        return {"rows": self.rows, "at": self.at}

    def load_state_dict(self, state):
        self.rows[...], self.at = state["rows"], state["at"]


class Space:
    """A space of gymnasium's shape, whose generator is made when it is first used."""

    def __init__(self):
        self._np_random = None

    @property
    def np_random(self):
        if self._np_random is None:
            self._np_random = np.random.default_rng()
        return self._np_random

    def seed(self, seed):
        self._np_random = np.random.default_rng(seed)

    def sample(self):
        return int(self.np_random.integers(2))

    def contains(self, value):
        return value in (0, 1)


class Walk:
    """An environment of gymnasium's shape: a walk that ends at 3."""

    def __init__(self):
        self.action_space, self._np_random, self.state = Space(), None, None
        self.screen, self.window = None, object()

    @property
    def np_random(self):
        if self._np_random is None:
            self._np_random = np.random.default_rng()
        return self._np_random

    def reset(self, *, seed=None):
        if seed is not None:
            self._np_random = np.random.default_rng(seed)
        self.state = np.zeros(1)
        return self.state.copy()

    def step(self, action):
        self.state = self.state + action + 0.1 * self.np_random.normal()
        return self.state.copy(), float(action), bool(self.state[0] > 3)


class Limit:
    """A wrapper of one."""

    def __init__(self, env):
        self.env, self.steps = env, 0
        self.action_space = env.action_space

    def reset(self, **options):
        self.steps = 0
        return self.env.reset(**options)

    def step(self, action):
        self.steps += 1
        observation, reward, ended = self.env.step(action)
        return observation, reward, ended or self.steps == 7


def train(folder, *, kill=None, resume=None, epochs=3):
    """Train with everything that can be kept; return what the loop saw, and the end of each kept value."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(1), np.random.default_rng(2), np.random.RandomState(3), random.Random(4)]
    env, storage, queue, counts = Limit(Walk()), torch.zeros(4), deque(maxlen=3), {"ended": 0}
    observation = env.reset(seed=5)
    env.action_space.seed(6)
    seen = []
    with Run(
        Bus(CheckpointHook(interval=1, by_epoch=False)), model=model, optimizer=optimizer, work_dir=folder, resume=resume
    ) as run:
        kept = run.keep(
            best=0.0,
            name="",
            observation=observation,
            env=env,
            generators=generators,
            storage=storage,
            queue=queue,
            counts=counts,
        )
        run.keep(buffer=(buffer := Buffer()), seen_values=set())
        for _ in run.epochs(epochs):
            for number in run.train(range(5)):
                drawn = [
                    torch.rand(1, generator=generators[0]).item(),
                    *(one.random() for one in (generators[1], generators[3])),
                ]
                drawn.append(generators[2].random_sample())
                observation, _, ended = env.step(env.action_space.sample())
                kept.observation = observation
                if ended:
                    counts["ended"] += 1
                    kept.observation = env.reset()
                storage[number % 4] += drawn[0]
                queue.append(drawn[1])
                buffer.add(drawn[2])
                kept.best, kept.name = max(kept.best, drawn[3]), f"{run.progress.iter}"
                kept.seen_values.add(number * 2)
                loss = model(torch.tensor(kept.observation, dtype=torch.float32)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append((drawn, observation.tolist(), storage.tolist(), list(queue), buffer.rows.tolist(), dict(counts)))
                seen[-1] += kept.best, kept.name, env.steps, sorted(kept.seen_values)
                if kill is not None and run.progress.iter + 1 == kill:
                    raise KeyboardInterrupt
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_killed_run_sees_what_an_uninterrupted_one_sees(tmp_path):
    whole, weights = train(tmp_path / "whole")
    assert {one[5]["ended"] for one in whole} > {0, 1}
    for kill in range(2, 16, 3):
        folder = tmp_path / str(kill)
        with pytest.raises(KeyboardInterrupt):
            train(folder, kill=kill)
        seen, resumed = train(folder, resume="auto")
        assert seen == whole[kill - 1 :]
        assert all(map(torch.equal, resumed, weights))


def test_attributes_of_an_environment_that_are_no_values_are_named(tmp_path, logs):
    train(tmp_path, epochs=1)
    (told,) = [entry["attributes"] for entry in logs if entry.get("id") == "attributes-not-kept"]
    assert told == ["Walk.window"]


def begun(folder, **options):
    model = nn.Linear(1, 1)
    return Run(
        Bus(CheckpointHook()), model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), work_dir=folder, **options
    )


def step(run):
    for _ in run.epochs(1):
        for _ in run.train(range(1)):
            run.optimizers["optimizer"].step()


@pytest.mark.parametrize(
    ("value", "named"),
    [(object(), "value, a object"), ({"a": [3, object()]}, r"value\['a'\]\[1\]"), (SimpleNamespace(), "SimpleNamespace")],
)
def test_what_cannot_be_kept_is_an_error_that_names_it(tmp_path, value, named):
    with begun(tmp_path) as run, pytest.raises(ConfigurationError, match=named):
        run.keep(value=value)


def test_environments_in_other_processes_are_refused(tmp_path):
    env = Limit(Walk())
    env.processes = []
    with begun(tmp_path) as run, pytest.raises(ConfigurationError, match="SyncVectorEnv"):
        run.keep(env=env)


def test_names_are_unique_and_misspelt_ones_are_errors(tmp_path):
    with begun(tmp_path, stateful={"kept": Buffer()}) as run, pytest.raises(ConfigurationError, match="kept"):
        run.keep(best=1)
    with begun(tmp_path / "other") as run:
        kept = run.keep(best=1)
        with pytest.raises(ConfigurationError, match="best"):
            run.keep(best=2)
        for wrong in (lambda: kept.bets, lambda: setattr(kept, "bets", 3)):
            with pytest.raises(AttributeError, match="'best'"):
                wrong()
        assert kept.best == run.kept.best == 1


def test_it_comes_between_the_beginning_of_a_run_and_that_of_its_training(tmp_path):
    run = begun(tmp_path)
    with pytest.raises(TrainingError, match="with Run"):
        run.keep(best=1)
    with run:
        for _ in run.epochs(1):
            for _ in run.train(range(1)):
                with pytest.raises(TrainingError, match="before training begins"):
                    run.keep(best=1)


def test_values_that_only_one_of_program_and_checkpoint_has_are_told(tmp_path, logs):
    with begun(tmp_path) as run:
        run.keep(old=1, both=2).both = 3
        step(run)
    with begun(tmp_path / "new", resume=tmp_path / "epoch_1.safetensors") as run:
        kept = run.keep(new=4, both=5)
        assert (kept.new, kept.both) == (4, 3)
        step(run)
    named = {key: entry[key] for entry in logs for key in ("name", "names") if key in entry and "kept" in entry["event"]}
    assert named == {"name": "new", "names": ["old"]}


def test_a_number_that_the_loop_never_reads_from_its_attribute_is_told(tmp_path, logs):
    with begun(tmp_path) as run:
        run.keep(best=0.0, rows=[1])
        step(run)
    assert [entry["names"] for entry in logs if entry.get("id") == "kept-values-unused"] == [["best"]]


def test_an_array_of_another_size_replaces_the_attribute(tmp_path):
    with begun(tmp_path) as run:
        kept = run.keep(rows=np.zeros(2), tensor=torch.zeros(2))
        kept.rows, kept.tensor = np.arange(3), torch.arange(3)
        step(run)
    assert load(tmp_path / "epoch_1.safetensors")["stateful"]["kept"]["rows"].tolist() == [0, 1, 2]
    with begun(tmp_path, resume="auto") as run:
        kept = run.keep(rows=np.zeros(2), tensor=torch.zeros(2))
        assert kept.rows.tolist() == kept.tensor.tolist() == [0, 1, 2]


ENVIRONMENTS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0", "FrozenLake-v1", "Blackjack-v1"]


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("vector", [False, True])
def test_environments_of_gymnasium_come_back_in_the_middle_of_an_episode(tmp_path, name, vector, logs):
    gym = pytest.importorskip("gymnasium")

    def make():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(name))
        if isinstance(env.observation_space, gym.spaces.Box):
            env = gym.wrappers.NormalizeObservation(env)
        return gym.wrappers.NormalizeReward(env)

    def play(*, steps, resume=None, folder=tmp_path):
        env = gym.vector.SyncVectorEnv([make] * 2) if vector else make()
        env.action_space.seed(1)
        env.reset(seed=1)
        seen = []
        with begun(folder, resume=resume) as run:
            kept = run.keep(env=env, over=False)
            for _ in run.epochs(max_iters=steps):
                for _ in run.train(range(steps)):
                    if kept.over:
                        seen.append(repr(env.reset()[0]))
                    observation, reward, ended, cut, _ = env.step(env.action_space.sample())
                    kept.over = not vector and bool(ended or cut)
                    seen.append(repr((observation, reward, ended, cut)))
                    run.optimizers["optimizer"].step()
        return seen

    whole = play(steps=60, folder=tmp_path / "whole")
    for first in (7, 31):
        part = play(steps=first, folder=tmp_path / str(first))
        assert part + play(steps=60, resume="auto", folder=tmp_path / str(first)) == whole
    assert not [entry for entry in logs if entry.get("id") == "attributes-not-kept"]


def test_what_a_program_draws_before_its_training_does_not_change_a_resumed_run(tmp_path):
    def draws(folder, epochs, resume=None):
        """Draw in the loop, and before it."""
        seen = []
        with begun(folder, seed=3, resume=resume) as run:
            kept = run.keep(value=torch.rand(3))
            random.random()
            for _ in run.epochs(epochs):
                for _ in run.train(range(2)):
                    kept.value = kept.value + torch.rand(3)
                    seen.append((kept.value.tolist(), random.random()))
                    run.optimizers["optimizer"].step()
        return seen

    whole = draws(tmp_path / "whole", 3)
    assert draws(tmp_path / "part", 1) + draws(tmp_path / "part", 3, resume="auto") == whole


def test_a_loop_of_calls_gets_what_it_keeps(tmp_path):
    def draws(folder, epochs, resume=None):
        seen = []
        with begun(folder, seed=3, resume=resume) as run:
            kept = run.keep(value=torch.rand(3))
            drive = run.drive()
            drive.begin_train(max_epochs=epochs)
            while run.counters.epoch < epochs:
                for batch in drive.begin_epoch(range(2)):
                    drive.begin_iteration(batch)
                    kept.value = kept.value + torch.rand(3)
                    seen.append(kept.value.tolist())
                    run.optimizers["optimizer"].step()
                    drive.end_iteration()
                drive.end_epoch()
            drive.end_train()
        return seen

    whole = draws(tmp_path / "whole", 3)
    assert draws(tmp_path / "part", 1) + draws(tmp_path / "part", 3, resume="auto") == whole


def test_what_differs_between_processes_is_told(tmp_path, monkeypatch, logs):
    monkeypatch.setattr(Run, "world_size", 2)
    with begun(tmp_path) as run:
        run.keep(best=0.0, rngs=[random.Random(1)], env=Limit(Walk()))
    assert [entry["names"] for entry in logs if "rank 0" in entry["event"]] == [["rngs", "env"]]


def train_in_heads(folder, order, *, kill=None, resume=None, ledger=None):
    """Train batches of an order that each epoch's head shuffles, and with a weight that it makes smaller."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = len(order) // 3
    stateful = {} if ledger is None else {"ledger": ledger}
    bus = Bus(CheckpointHook(interval=1, by_epoch=False))
    with Run(bus, model=model, optimizer=optimizer, work_dir=folder, resume=resume, stateful=stateful) as run:
        kept = run.keep(order=order, heads=0)
        for epoch in run.epochs(3):
            kept.heads += 1
            (np.random if isinstance(order, np.ndarray) else random).shuffle(kept.order)
            weight = 0.5**kept.heads
            batches = [torch.as_tensor(kept.order[at : at + rows]) / len(order) for at in range(0, len(order), rows)]
            for batch in run.train(batches):
                if kill == (epoch, run.counters.batches):
                    raise KeyboardInterrupt
                loss = weight * (model(batch.float()[:, None]) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return kept.heads, model.weight.item()


@pytest.mark.long
@pytest.mark.parametrize("order", [list(range(1_200)), list(range(50_000)), np.arange(300_000)], ids=["1200", "50000", "array"])
def test_a_large_value_that_an_epoch_begins_by_changing_comes_back(tmp_path, order, logs):
    whole = train_in_heads(tmp_path / "whole", copy.copy(order))
    with pytest.raises(KeyboardInterrupt):
        train_in_heads(tmp_path / "part", copy.copy(order), kill=(1, 2))
    assert train_in_heads(tmp_path / "part", copy.copy(order), resume="auto") == whole
    assert not left_out(logs)


def left_out(logs):
    return [entry["names"] for entry in logs if entry.get("id") == "values-too-large"]


class Ledger:
    """An object whose state has many rows."""

    def state_dict(self):
        return {"rows": [(number, None, torch.zeros(0)) for number in range(1_000)]}

    def load_state_dict(self, state):
        assert len(state["rows"]) == 1_000


@pytest.mark.long
def test_what_is_too_large_to_copy_is_told_once_and_leaves_small_values_exact(tmp_path, logs):
    order = [*range(200_000)]
    with pytest.raises(KeyboardInterrupt):
        train_in_heads(tmp_path, order.copy(), kill=(1, 2), ledger=Ledger())
    heads, _ = train_in_heads(tmp_path, order.copy(), resume="auto", ledger=Ledger())
    assert heads == 3
    assert left_out(logs) == [["kept.order", "ledger"]]


def test_a_validation_that_comes_again_has_kept_values_large_and_small(tmp_path):
    def validate(kill=None, resume=None):
        with begun(tmp_path, resume=resume) as run:
            kept = run.keep(order=[*range(200_000)], seen=0)
            for _ in run.epochs(1):
                for _ in run.train(range(1)):
                    run.optimizers["optimizer"].step()
                for number in run.validate(range(4)):
                    kept.seen += 1
                    if number == kill:
                        run.checkpoints.save()
                    elif kill is not None and number > kill:
                        raise KeyboardInterrupt
        return kept.seen, len(kept.order)

    with pytest.raises(KeyboardInterrupt):
        validate(kill=1)
    assert validate(resume="auto") == (4, 200_000)


CONTAINERS = {
    "list": lambda *tensors: [*tensors],
    "tuple": lambda *tensors: tensors,
    "deque": lambda *tensors: deque(tensors, maxlen=5),
    "dict": lambda *tensors: dict(enumerate(tensors)),
    "nested": lambda first, *others: [(first, [*others]), {"first": first}],
}


def saved_and_resumed(folder, make, change):
    """Keep what ``make`` returns, change it by ``change(kept)`` and save; return what a resumed run has."""
    with begun(folder) as run:
        kept = run.keep(value=make())
        change(kept)
        kept.value = kept.value
        step(run)
    with begun(folder, resume="auto") as run:
        live = make()
        return live, run.keep(value=live).value


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_is_in_a_container_comes_back_in_place(tmp_path, container):
    made = []

    def make():
        made.append((torch.zeros(2), np.zeros(3), {"best": 0}))
        return CONTAINERS[container](*made[-1])

    def change(kept):
        tensor, array, best = made[-1]
        tensor += 1
        array += 2
        best["best"] = 3

    live, value = saved_and_resumed(tmp_path, make, change)
    tensor, array, best = made[-1]
    assert (tensor.tolist(), array.tolist(), best["best"]) == ([1, 1], [2, 2, 2], 3)
    assert value is live or container == "tuple"


def test_a_list_of_another_length_is_the_same_list_with_the_saved_values(tmp_path):
    live, value = saved_and_resumed(tmp_path, lambda: [torch.zeros(1)], lambda kept: kept.value.append(torch.ones(2)))
    assert value is live
    assert [one.tolist() for one in live] == [[0], [1, 1]]


@pytest.mark.parametrize(
    ("make", "new"),
    [
        (lambda: [torch.zeros(1)] * 4, lambda place: torch.full((1,), float(place))),
        (lambda: [np.zeros(1)] * 4, lambda place: np.full(1, float(place))),
        (lambda: [[0]] * 4, lambda place: [place]),
        (lambda: [*torch.zeros(1).expand(4, 1)], lambda place: torch.full((1,), float(place))),
        (lambda: dict.fromkeys(range(4), torch.zeros(1)), lambda place: torch.full((1,), float(place))),
    ],
    ids=["tensor", "array", "list", "expanded", "dict"],
)
def test_one_object_at_several_places_does_not_take_the_values_of_several(tmp_path, make, new):
    def change(kept):
        for place in range(4):
            kept.value[place] = new(place)

    _, value = saved_and_resumed(tmp_path, make, change)
    assert [value[place][0] for place in range(4)] == [0, 1, 2, 3]


def test_one_object_at_several_places_stays_one(tmp_path):
    def change(kept):
        kept.value[2] += 1

    _, value = saved_and_resumed(tmp_path, lambda: [torch.zeros(1)] * 4, change)
    assert value[0] is value[1] is value[3]
    assert value[0].item() == 1


def test_names_of_one_object_do_not_take_each_others_values(tmp_path):
    def keep(folder, **options):
        zeros = torch.zeros(1)
        with begun(folder, **options) as run:
            run.keep(first=zeros)
            kept = run.keep(second=zeros)
            if not options:
                kept.second = torch.ones(1)
                step(run)
            return kept.first.item(), kept.second.item()

    assert keep(tmp_path) == keep(tmp_path, resume="auto") == (0, 1)


def test_a_tensor_with_less_memory_than_numbers_is_replaced(tmp_path):
    def change(kept):
        kept.value = torch.arange(4.0)

    _, value = saved_and_resumed(tmp_path, lambda: torch.zeros(1).expand(4), change)
    assert value.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_with_other_entries_come_back(tmp_path, sparse):
    def change(kept):
        kept.value = [sparse(torch.ones(3, 3))]

    _, value = saved_and_resumed(tmp_path, lambda: [sparse(torch.eye(3))], change)
    assert value[0].to_dense().sum() == 9


def never_used(logs):
    return [entry["names"] for entry in logs if entry.get("id") == "kept-values-unused"]


def test_a_run_that_was_stopped_or_had_nothing_to_train_does_not_tell_of_unused_values(tmp_path, logs):
    with begun(tmp_path) as run:
        run.keep(best=0.0)
        for _ in run.epochs(2):
            for _ in run.train(range(2)):
                run.optimizers["optimizer"].step()
                run.stop()
    with begun(tmp_path, resume="auto") as run:
        run.keep(best=0.0).best = 1.0
        step(run)
    with begun(tmp_path, resume="auto") as run:
        run.keep(best=0.0)
        step(run)
    assert not never_used(logs)


def test_a_tuple_of_tensors_comes_back_in_place_and_may_have_other_names(tmp_path, logs):
    with begun(tmp_path) as run:
        run.keep(shadow=(torch.zeros(1), [1]), pair=(1, 2))
        step(run)
    assert never_used(logs) == [["pair"]]
