"""``/metrics``: read with the parser of prometheus-client itself."""

import gc
import math
import sys
from contextlib import suppress

import httpx
import pytest
import torch
from torch import nn

from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.eventloop.events import AfterTrainIter, Progress
from trainbus.hooks import CheckpointHook

from ..failing import fails
from ..handlers import held
from ..hooks.conftest import batches, make_loop
from ..waiting import meanwhile, until

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from trainbus.observe.metrics import RunCollector, expose, metrics_app

OPEN = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """What one scrape has found."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def all(self, name: str, /, **labels: str) -> list[float]:
        return [one.value for one in self.samples if one.name == f"trainbus_{name}" and labels.items() <= one.labels.items()]

    def one(self, name: str, /, **labels: str) -> float:
        [value] = self.all(name, **labels)
        return value

    def state(self, run: str = "run") -> str:
        [state] = [one for one in self.samples if one.name == "trainbus_run_state" and one.value and one.labels["run"] == run]
        return state.labels["trainbus_run_state"]


def scrape(collector) -> Scrape:
    return Scrape(expose(collector, OPEN)[0].decode())


@pytest.fixture
def collector(bus) -> RunCollector:
    return RunCollector(bus)


def test_a_scrape_tells_how_far_and_how_fast_a_run_is(bus, collector, tmp_path):
    make_loop(bus=bus, val_data=[(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))], name='say "hi"\n\\o/').run()
    found = scrape(collector)
    run = {"run": 'say "hi"\n\\o/'}
    assert all(sample.labels["run"] == run["run"] for sample in found.samples)
    assert (found.one("iterations_total"), found.one("updates_total"), found.one("epochs_total")) == (8, 8, 2)
    assert found.one("step_seconds_count", **run) == found.one("step_seconds_bucket", le="+Inf") == 8
    assert found.one("step_seconds_sum") > 0
    buckets = found.all("step_seconds_bucket")
    assert buckets == sorted(buckets)
    assert found.one("learning_rate", optimizer="optimizer", group="0") == 0.1
    assert found.one("scalar", name="train/loss") > 0
    assert found.one("scalar", name="val/loss") > 0
    assert found.state('say "hi"\n\\o/') == "finished"
    assert found.one("throughput_iterations_per_second") == 0
    assert found.one("run_info", world_size="1", rank="0", device="cpu") == 1
    assert sum(found.all("cost_seconds_total")) == pytest.approx(bus.costs().wall, rel=0.02)
    assert found.all("cost_seconds_total", part="training.update.after_train_iter", mount_point="after_train_iter")


def test_scrapes_before_during_and_after_a_run_read_alike(bus, collector):
    during = []
    bus.on("after_train_iter", lambda event: during.append(scrape(collector)))
    assert scrape(collector).samples == []
    make_loop(bus=bus).run()
    assert {one.state() for one in during} == {"running"}
    assert [one.one("iterations_total") for one in during] == list(range(8))
    after = scrape(collector)
    assert after.one("iterations_total") == 8
    assert set(during[-1].families) <= set(after.families)


@pytest.mark.parametrize(
    ("end", "state", "iterations"),
    [
        (fails(ValueError), "failed", 2),
        (fails(KeyboardInterrupt), "interrupted", 2),
        (lambda event: event.run.stop("enough"), "stopped", 3),
        (bool, "finished", 8),
    ],
)
def test_it_tells_how_a_run_ended(bus, collector, end, state, iterations):
    bus.on("after_train_iter", end, once=3)
    with suppress(ValueError, KeyboardInterrupt):
        make_loop(bus=bus).run()
    found = scrape(collector)
    assert (found.state(), found.one("iterations_total"), found.one("learning_rate")) == (state, iterations, 0.1)


def test_a_run_that_waits_is_paused(bus, collector):
    seen = []
    bus.on("after_train_iter", lambda event: event.run.pause(), once=2)

    @bus.on("run_paused", priority="LOWEST", offload="thread", capture=lambda event: None)
    def look(_):
        seen.append(scrape(collector).state())
        loop.unpause()

    loop = make_loop(bus=bus)
    loop.run()
    assert seen == ["paused"]
    assert scrape(collector).state() == "finished"


def test_runs_of_one_process_have_a_label_each():
    collector, buses = RunCollector(), [Bus() for _ in range(4)]
    for bus, given in zip(buses, (None, None, None, "mine"), strict=True):
        collector.add(bus, given)
    collector.add(buses[0])
    for bus, name, epochs in zip(buses, ("digits", "digits", "digits-2", "digits"), (1, 2, 3, 4), strict=True):
        make_loop(bus=bus, name=name, max_epochs=epochs).run()
    found = scrape(collector)
    epochs = {"digits": 1, "digits-2": 2, "mine": 4}
    assert {run: found.one("epochs_total", run=run) for run in epochs} == epochs
    assert len({sample.labels["run"] for sample in found.samples}) == 4
    collector.remove(buses[0])
    assert scrape(collector).one("epochs_total", run="digits") == 2
    assert all(hook.label != "LatestHook" for hook in buses[0].hooks)


def test_a_registry_takes_one_collector_of_runs():
    registry = CollectorRegistry()
    buses = [Bus(), Bus()]
    registry.register(RunCollector(buses[0]))
    with pytest.raises(ValueError, match="trainbus"):
        registry.register(RunCollector(buses[1]))
    make_loop(bus=buses[0]).run()
    names = {family.name for family in parse_plain(generate_latest(registry).decode())}
    assert {"trainbus_iterations", "trainbus_step_seconds"} <= names


def test_lanes_tell_depth_drops_and_failures_and_their_counts_never_fall(bus, collector):
    lane, _, _, go_on = held(bus, queue=2, full="drop_new")
    broken = bus.on("after_train_iter", fails(ValueError("broken")), offload="thread", on_error="log")
    bus.on("before_train_iter", fails(ValueError("broken")), on_error="log")
    seen = []

    @bus.on("after_train", priority="LOWEST")
    def look(event):
        until(lambda: lane.stats.delivered + lane.stats.pending + lane.stats.dropped == 8)
        seen.append(scrape(collector))
        go_on.set()

    make_loop(bus=bus).run()
    of_held = {"handler": lane.label, "mount_point": "after_train_iter"}
    counts = [seen[0].one(name, **of_held) for name in ("lane_depth", "lane_dropped_total", "lane_delivered_total")]
    assert sum(counts) == 8
    assert counts[1] >= 4
    after = scrape(collector)
    assert after.one("lane_depth", **of_held) == 0
    assert after.one("lane_failed_total", handler=broken.label) == 8
    assert sum(after.all("handler_failures_total")) == 8
    lane.cancel()
    again = scrape(collector)
    assert again.one("lane_dropped_total", **of_held) == after.one("lane_dropped_total", **of_held)
    bus.on("after_train_iter", lane.handler, offload="thread")
    assert scrape(collector).one("lane_delivered_total", **of_held) == after.one("lane_delivered_total", **of_held)


def test_checkpoints_tell_stall_commit_and_age_and_a_further_name_of_a_file_is_none(bus, collector, tmp_path):
    sizes = []
    bus.on("checkpoint_committed", lambda event: sizes.append(event.bytes))
    hook = CheckpointHook(interval=1, save_best="loss", save_last=False)
    make_loop(hook, bus=bus, work_dir=tmp_path, val_data=batches(1)).run()
    found = scrape(collector)
    assert len(sizes) > 2
    assert found.one("checkpoints_total", outcome="committed") == found.one("checkpoint_commit_seconds_count") == 2
    assert found.one("checkpoints_total", outcome="failed") == 0
    assert found.one("checkpoint_commit_seconds_sum") > 0
    assert found.one("checkpoint_bytes") == max(sizes) > 1000
    assert 0 <= found.one("checkpoint_age_seconds") <= scrape(collector).one("checkpoint_age_seconds") < 1000


def test_scalars_keep_their_names_and_may_be_any_number(bus, collector):
    given = {'a "b"\n\\': 1.5, "ünï/code": torch.tensor([2.0], requires_grad=True)}
    given |= {"nan": math.nan, "inf": torch.tensor(math.inf), "text": "no number", "logits": torch.zeros(3), "flag": True}
    with Run(bus, model=nn.Linear(1, 1), name="own") as run:
        for _ in run.epochs(1):
            for _ in run.train([0]):
                run.report(**given)
    found = scrape(collector)
    scalars = {one.labels["name"]: one.value for one in found.families["trainbus_scalar"].samples}
    assert math.isnan(scalars.pop("train/nan"))
    assert scalars == {'train/a "b"\n\\': 1.5, "train/ünï/code": 2.0, "train/inf": math.inf, "train/flag": 1.0}


def test_two_scrapes_at_once_beside_a_training(bus, collector):
    one, other = [], []
    with meanwhile(lambda: one.append(scrape(collector))), meanwhile(lambda: other.append(scrape(collector))):
        make_loop(bus=bus, max_epochs=20).run()
    for scrapes in (one, other):
        counts = [value for found in scrapes for value in found.all("step_seconds_count")]
        assert counts == sorted(counts)


def test_a_collector_that_comes_late_meets_the_run(bus):
    collector = RunCollector()
    bus.on("after_train_iter", lambda event: collector.add(bus), once=2)
    make_loop(bus=bus, name="late").run()
    assert scrape(collector).one("iterations_total", run="late") == 8


def test_it_keeps_no_bus_alive():
    bus = Bus()
    collector = RunCollector(bus)
    make_loop(bus=bus).run()
    del bus
    gc.collect()
    assert scrape(collector).samples == []
    with pytest.raises(ConfigurationError, match="bus"):
        RunCollector("bus")


@pytest.mark.anyio
async def test_the_application_answers_in_the_format_that_is_asked_for(bus, collector):
    with bus:
        bus.publish(AfterTrainIter(progress=Progress()))  # made by hand: without a run there is nothing to tell
    transport = httpx.ASGITransport(metrics_app(collector))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.get("/metrics", headers={"accept": OPEN})
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert list(text_string_to_metric_families(response.text)) == []
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        head = await client.head("/metrics", headers={"accept": OPEN})
        assert (head.content, int(head.headers["content-length"])) == (b"", len(b"# EOF\n"))
        assert (await client.post("/metrics")).status_code == 405


def test_without_prometheus_client_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "trainbus.observe.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"trainbus\[metrics\]"):
        import trainbus.observe.metrics  # noqa: F401
