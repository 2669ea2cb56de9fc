"""Measure the time that a training thread needs to hand an event to a consumer, and the time until the event arrives.

The publisher hands over as fast as it can, every 20 µs, and every millisecond. In between it multiplies matrices, or takes
a step of training. Both release the GIL as real work does, so that consumers can run, and both leave the caches as cold as
training does. (A busy loop would keep the GIL from the consumer.) Each publish is timed separately, and the time of reading the
clock under the same condition in the same round is subtracted.

Last: how much longer a step of plain Python takes while a handler computes in Python too.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.handoff import HandOffFigures, Promise, Round
from benchmarks.harness import SUBJECT, Comparison, Sample, Settings, measure, one_thread, paused_gc
from benchmarks.peers import HandOff, HandOffs, Stamped, load, stdlib, trainbus
from trainbus.eventloop import Bus
from trainbus.eventloop.errors import SubscribeError

PEERS = ("anyio", "pyee", "bubus")
LINGER = 0.01  # the default of a lane
PROMISE = Promise(3, 0.4e-6, 2 * LINGER, of=(f"{SUBJECT}, thread lane", f"{SUBJECT}, async lane"))
PATIENCE = 60  # seconds within which an event must arrive
ENOUGH = 0.05  # seconds that a burst has to take for its rate to count
LONGEST = 20_000  # events of a burst

Work = Callable[[], object]


@dataclass(frozen=True)
class Scenario:
    """The publisher's work between two events."""

    title: str
    work: Work | None
    events: int
    promise: Promise | None = None


def run(settings: Settings) -> list[HandOffFigures | Comparison]:
    modules, left_out = load(PEERS)
    contenders = dict(stdlib.offload())
    for module in (*modules.values(), trainbus):
        contenders |= module.offload()
    with one_thread():
        scenarios = all_scenarios()
        measured = hand_offs(contenders, scenarios, settings)
        rates = [events_per_second(contenders, settings), *({} for _ in scenarios[1:])]
        figures = [
            HandOffFigures(scenario.title, stdlib.FLOOR, rounds, scenario.promise, left_out, rate)
            for scenario, rounds, rate in zip(scenarios, measured, rates, strict=True)
        ]
        return [*figures, interference(settings)]


# -------------------------------------------------------------------------------------------------- hand-off, arrival


def hand_offs(
    contenders: Mapping[str, HandOffs], scenarios: list[Scenario], settings: Settings
) -> list[dict[str, list[Round]]]:
    """The rounds of every contender, for each scenario."""
    rounds = settings.rounds(quick=1, full=9)
    measured: list[dict[str, list[Round]]] = [{name: [] for name in contenders} for _ in scenarios]
    for number in range(rounds):
        for scenario, figures in zip(scenarios, measured, strict=True):
            clock = clock_alone(scenario.work, scenario.events)
            for name, hand_off in contenders.items():
                figures[name].append(one_round(hand_off, scenario, clock))
        settings.tick_part(0, 3, number + 1, rounds)
    return measured


def one_round(hand_off: HandOffs, scenario: Scenario, clock: float) -> Round:
    """Hand over one series of events to a consumer made for it, and wait until all have arrived."""
    with receiver(hand_off) as (way, arrived), paused_gc():
        series(way, scenario.work, 20)  # warm up: the consumer sleeps, and its code is cold
        arrival(way, arrived, 20)
        arrived.clear()
        spent = series(way, scenario.work, scenario.events)
        arrival(way, arrived, scenario.events)
        delivery = [(now - at) / 1e9 for at, now in arrived]
    return Round([nanoseconds / 1e9 - clock for nanoseconds in spent], delivery)


def series(way: HandOff, work: Work | None, events: int) -> list[int]:
    """Publish, with ``work`` before each, and return what each publish took in nanoseconds."""
    spent = []
    publish, make, now = way.publish, way.make, time.perf_counter_ns
    for _ in range(events):
        if work is not None:
            work()
        event = make(now())
        start = now()
        publish(event)
        spent.append(now() - start)
    return spent


@contextmanager
def receiver(hand_off: HandOffs) -> Iterator[tuple[HandOff, list[tuple[int, int]]]]:
    """Set up a hand-off and the list of when events were published and when they arrived."""
    arrived: list[tuple[int, int]] = []
    now = time.perf_counter_ns

    def receive(event: object) -> None:
        arrived.append((event.at, now()))

    with hand_off(receive) as way:
        yield way, arrived


def arrival(way: HandOff, arrived: list[tuple[int, int]], events: int) -> None:
    """Wait for events to arrive.

    Raises:
        RuntimeError: they do not arrive in time.
    """
    deadline = time.monotonic() + PATIENCE
    while way.delivers and len(arrived) < events:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(arrived)} of {events} events arrived within {PATIENCE} s")
        time.sleep(0.0005)


def clock_alone(work: Work | None, events: int) -> float:
    """Return the median of :func:`series` for an empty publish, in seconds."""
    spent = []
    now = time.perf_counter_ns
    for _ in range(events):
        if work is not None:
            work()
        Stamped(now())
        start = now()
        spent.append(now() - start)
    return statistics.median(spent) / 1e9


# ------------------------------------------------------------------------------------------- events per second


def events_per_second(contenders: Mapping[str, HandOffs], settings: Settings) -> dict[str, list[float]]:
    """Return the rate of a burst published as fast as possible, until its last event arrives."""
    sizes = {name: long_enough(hand_off) for name, hand_off in contenders.items() if name != stdlib.FLOOR}
    rates: dict[str, list[float]] = {name: [] for name in sizes}
    rounds = settings.rounds(quick=1, full=5)
    for number in range(rounds):
        for name, events in sizes.items():
            rates[name].append(events / burst(contenders[name], events))
        settings.tick_part(1, 3, number + 1, rounds)
    return rates


def long_enough(hand_off: HandOffs) -> int:
    """Return the number of events of a burst that makes starting and lingering negligible."""
    events = 200
    while events < LONGEST and burst(hand_off, events) < ENOUGH:
        events *= 4
    return events


def burst(hand_off: HandOffs, events: int) -> float:
    """Return the seconds from the first publish to the last arrival."""
    with receiver(hand_off) as (way, arrived), paused_gc():
        start = time.perf_counter_ns()
        series(way, None, events)
        arrival(way, arrived, events)
        return (arrived[-1][1] - start) / 1e9


# --------------------------------------------------------------------------------------------- a busy handler


def interference(settings: Settings) -> Comparison:
    """Measure a step of plain Python that publishes once, while the handler computes in plain Python for half as long."""
    number = trainbus.BUSY_COUNT
    contenders: dict[str, Sample] = {"no handler": partial(python_steps, Bus(), number)}
    left_out = {}
    for mode, handler, options in (
        ("async lane", trainbus.busy_async_handler, {}),
        ("thread lane", trainbus.busy_handler, {"offload": "thread"}),
        ("process lane", trainbus.busy_handler, {"offload": "process"}),
        ("inline", trainbus.busy_handler, {}),
    ):
        bus = Bus()
        try:
            bus.on(trainbus.Published, handler, **options)
        except SubscribeError as error:
            left_out[f"{SUBJECT}, {mode}"] = str(error)
        else:
            contenders[f"{SUBJECT}, {mode}"] = partial(python_steps, bus, number)
    samples = measure(contenders, settings.rounds(quick=2, full=9), partial(settings.tick_part, 2, 3))
    title = "A step of plain Python beside a handler that needs half as much Python"
    return Comparison(title, "µs", "no handler", samples, left_out=left_out)


def python_steps(bus: Bus, number: int, steps: int = 150) -> float:
    """Return the seconds per step, without the drain afterwards."""
    with bus:
        bus.publish(trainbus.published(0))
        if bus.subscriptions:
            bus.drain(PATIENCE)  # a process has to start
        start = time.perf_counter()
        for _ in range(steps):
            trainbus.count(2 * number)
            bus.publish(trainbus.published(0))
        return (time.perf_counter() - start) / steps


# ------------------------------------------------------------------------------------------------------- the work


def all_scenarios() -> list[Scenario]:
    """The three gaps; the longest twice, made of matrices and of a step of training."""
    product = matrix_product(20e-6)
    return [
        Scenario("As fast as it can", None, 300),
        Scenario("Every 20 µs, between matrix products", product, 300),
        Scenario("Every ms, between matrix products", lasting(product, 1e-3), 200, PROMISE),
        Scenario("Every ms, between steps of training", training_step(1e-3), 200, PROMISE),
    ]


def matrix_product(seconds: float) -> Work:
    """Return a product of square matrices that takes about ``seconds``."""
    for size in range(32, 512, 8):
        left, right, out = (torch.rand(size, size) for _ in range(3))
        product = partial(torch.mm, left, right, out=out)
        if duration(product) >= seconds:
            break
    return product


def lasting(work: Work, seconds: float) -> Work:
    times = max(1, round(seconds / duration(work)))

    def repeated() -> None:
        for _ in range(times):
            work()

    return repeated


def training_step(seconds: float) -> Work:
    """Forward, backward and AdamW of a small network, on batches of such a size that it takes about so long."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    for size in range(32, 1024, 32):
        work = partial(step, torch.rand(size, 64), torch.randint(10, (size,)))
        if duration(work) >= seconds:
            break
    return work


def duration(work: Work) -> float:
    """Seconds, at the median of a few."""
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
