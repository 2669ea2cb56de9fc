"""The dashboard on a real server: what visitors are told, and what they can ask for."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from trainbus import attach
from trainbus.eventloop import Bus, ConfigurationError, Run
from trainbus.eventloop.checkpoint import load
from trainbus.eventloop.events import AfterRun, AfterTrainIter, BeforeRun, Progress
from trainbus.hooks import CheckpointHook
from trainbus.observe import Dashboard
from trainbus.observe.dashboard import Board, Server, Watcher
from trainbus.observe.dashboard.server import DEFAULT_PORT, SERVERS
from trainbus.observe.record import Checkpoint, Pause

from ..hooks.conftest import loss_of, small_model
from ..scripts import Script
from ..waiting import until
from .dashboards import DATA, Job, Visitor, failing, messages, serving, wait_for, watched

pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


def test_a_visitor_is_told_everything_in_order_until_the_run_ends(server, visitor, tmp_path):
    with watched(server, bus=Bus(CheckpointHook(interval=1)), epochs=3, work_dir=tmp_path), visitor.told() as told:
        heard = list(told)
    assert [number for number, _, _ in heard] == sorted({number for number, _, _ in heard})
    hello = {"name": tmp_path.name, "work_dir": str(tmp_path), "state": "running", "refusals": {}, "lr": 0.1}
    assert heard[0][1:] == ("hello", hello | {"began": heard[0][2]["began"]})
    assert heard[-1][1] == "state"
    assert heard[-1][2] | {"time": 0} == {"time": 0, "iter": 15, "epoch": 3, "state": "finished", "over": True, "reason": ""}
    points = [data for _, kind, data in heard if kind == "scalars"]
    assert [one for data in points for one in data["iter"]] == list(range(1, 16))
    assert [one for data in points for one in data["epoch"]] == [1] * 5 + [2] * 5 + [3] * 5
    assert all(math.isfinite(one) for data in points for one in data["values"]["loss"])
    assert [data["iter"] for _, kind, data in heard if kind == "validation"] == [5, 10, 15]
    names = [name for _, kind, data in heard if kind == "checkpoint" for name in data["names"]]
    assert names == ["epoch_1.safetensors", "epoch_2.safetensors", "epoch_3.safetensors"]
    assert {"max_epochs": 3, "max_iters": None} in [data for _, kind, data in heard if kind == "progress"]


def files_of(told):
    """The last list of checkpoint files that a visitor was told."""
    return [[*one["names"]] for one in [data for _, kind, data in told if kind == "files"][-1]["files"]]


def test_the_list_of_checkpoints_has_the_files_that_are_there(server, visitor, tmp_path):
    hook = CheckpointHook(interval=1, max_keep_ckpts=2, save_best="loss", rule="less")
    with watched(server, bus=Bus(hook), epochs=5, work_dir=tmp_path), visitor.told() as told:
        heard = list(told)
    there = {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(there) == 3
    assert {name for names in files_of(heard) for name in names} == there
    assert [data["written"] for _, kind, data in heard if kind == "files"][-1] == 5
    (tmp_path / "epoch_4.safetensors").unlink()  # after the end, by a person
    with visitor.told() as told:
        late = list(told)
    assert {name for names in files_of(late) for name in names} == there - {"epoch_4.safetensors"}
    assert late[-1][1] == "state"


def test_a_file_that_cannot_be_looked_up_stays_in_the_list_and_one_that_is_written_again_is_there_once(tmp_path):
    page = Board().begin(None)
    here, elsewhere = tmp_path / "epoch_1.safetensors", "/of/another/machine/epoch_2.safetensors"
    here.touch()
    for at, names in enumerate([[str(here)], [elsewhere], ["s3://store/epoch_3.safetensors"], ["a\0b"], [str(here)]]):
        page.add(Checkpoint(time=0.0, iter=at, names=names, bytes=1))
    page.add(Checkpoint(time=0.0, iter=4, names=["s3://store/best"]))  # a further name
    said = [json.loads(one.partition(b"data: ")[2]) for one in page.messages.read()[0] if b"event: files" in one]
    assert [one["names"] for one in said[-1]["files"]] == [
        ["epoch_2.safetensors"],
        ["epoch_3.safetensors"],
        ["a\0b"],
        ["epoch_1.safetensors", "best"],
    ]


@pytest.mark.long
@pytest.mark.parametrize("number", ["9" * 5000, "2", "x", "-1", "\u00b2"])
def test_a_run_that_does_not_exist_is_not_found_by_any_number(server, visitor, number):
    with watched(server):
        assert visitor.client.get(f"/runs/{number}/events").status_code == 404
        assert visitor.client.get(f"/curves.json?runs={number}:0").status_code == 200


def test_late_and_returning_visitors_miss_nothing(server, visitor):
    with watched(server), visitor.told() as told:
        first = list(told)
    with visitor.told() as told:
        late = list(told)
    replaced = ("progress", "files")
    assert [one for one in late if one[1] not in replaced] == [one for one in first if one[1] not in replaced]
    with visitor.told(**{"Last-Event-ID": str(late[1][0])}) as told:
        assert list(told) == late[2:]
    answer = visitor.client.get("/runs/1/events", headers={"Last-Event-ID": str(late[-1][0])})
    assert answer.status_code == 204  # it has everything, and is not to come back
    for said in ("9" * 5000, "-1", "x", "\u00b2", ""):
        with visitor.told(**{"Last-Event-ID": said.encode("latin-1")}) as told:
            assert next(told)[1] == "hello", said[:10]


@pytest.mark.long
@pytest.mark.parametrize("in_code", [False, True])
def test_pause_holds_the_run_until_resume(server, visitor, in_code):
    with watched(server, slow=True) as job, visitor.told() as told:
        costs = wait_for(told, "costs")
        assert math.isclose(sum(part["seconds"] for part in costs["parts"]), costs["wall"], rel_tol=0.02)
        assert "Watcher.post" in [lane["name"] for lane in costs["lanes"]]
        assert costs["steps"]["number"] > 0 < costs["steps"]["p50"] <= costs["steps"]["p99"]
        if in_code:
            job.loop.pause()
        else:
            assert visitor.post("pause").status_code == 202
            wait_for(told, "state", state="pausing")
        at = wait_for(told, "state", state="paused")["iter"]
        for _ in range(20):
            assert visitor.client.get("/").status_code == 200
            assert job.loop.counters.iter == at
        assert visitor.post("resume").status_code == 202
        wait_for(told, "state", state="running")
        assert wait_for(told, "scalars")["iter"][-1] > at


NUMBERS = ['"fast"', '"0.1"', "null", "true", "-1", "0", "7000", "NaN", "Infinity", "1e999", "9" * 200, "[0.1]"]
REFUSED = {
    422: ["", "{}", "[1]", "[" * 256, '{"a":' * 50, b"\xff\xfe", *(f'{{"lr": {number}}}' for number in NUMBERS)],
    413: [f'{{"lr": {"9" * 5000}}}', "[" * 100_000, b"x" * 10_000_000],
}


@pytest.mark.long
def test_a_learning_rate_takes_effect_and_is_told_and_an_invalid_one_is_refused(server, visitor):
    with watched(server, slow=True) as job, visitor.told() as told:
        for status, bodies in REFUSED.items():
            for body in bodies:
                assert visitor.post("lr", content=body).status_code == status, body[:50]
        assert "above 0 and below 1000" in visitor.post("lr", content="{}").json()["error"]
        assert visitor.post("lr", json={"lr": 0.004}).status_code == 202
        assert wait_for(told, "asked")["what"] == "the learning rate 0.004"
        assert wait_for(told, "lr")["lr"] == 0.004
        assert job.loop._optimizer.param_groups[0]["lr"] == 0.004


def test_a_save_leaves_a_file_that_loads(server, visitor, tmp_path):
    with watched(server, slow=True, work_dir=tmp_path), visitor.told() as told:
        wait_for(told, "scalars")
        assert visitor.post("checkpoint").status_code == 202
        (name,) = wait_for(told, "checkpoint")["names"]
        assert load(tmp_path / name)["progress"]["iter"] == int(name.removeprefix("iter_").removesuffix(".safetensors"))


def test_a_command_that_the_run_cannot_follow_is_refused_with_the_reason(server, visitor):
    with watched(server, slow=True), visitor.told() as told:
        refusals = wait_for(told, "hello")["refusals"]
        assert list(refusals) == ["checkpoint"]
        assert "work_dir=" in refusals["checkpoint"]
        answer = visitor.post("checkpoint")
        assert answer.status_code == 409
        assert answer.json()["error"] == refusals["checkpoint"]


@pytest.mark.long
@pytest.mark.parametrize("paused", [False, True])
def test_stop_ends_the_run_in_order(server, visitor, paused):
    with watched(server, slow=True) as job, visitor.told() as told:
        wait_for(told, "scalars")
        if paused:
            visitor.post("pause")
            wait_for(told, "state", state="paused")
        assert visitor.post("stop").status_code == 202
        assert wait_for(told, "state", state="stopped")["reason"] == "stopped from the dashboard"
        assert list(told) == []
        job.thread.join(30)
        assert job.error is None
        answer = visitor.post("pause")
        assert (answer.status_code, answer.json()["error"]) == (409, "the run has ended")
        assert visitor.client.get("/runs/1/").status_code == 200


def test_a_failed_run_says_why(server, visitor):
    with failing(server, "out of luck"), visitor.told() as told:
        assert wait_for(told, "state", state="failed")["reason"] == "RuntimeError: out of luck"
        assert list(told) == []


def test_unknown_runs_commands_and_files_are_not_found(server, visitor):
    with watched(server):
        for method, path in [("POST", "/runs/1/launch"), ("POST", "/runs/2/stop"), ("GET", "/runs/2/events")]:
            assert visitor.client.request(method, path).status_code == 404, path
        for path in ("/static/page.py", "/static/..%2fpage.py", "/static/", "/etc/passwd"):
            assert visitor.client.get(path).status_code == 404, path


def test_the_runs_of_a_process_have_a_page_each(server, visitor):
    with watched(server, name="first"), Job(Bus(Watcher(server.board)), name="second"):
        pass
    runs = visitor.client.get("/runs.json").json()["runs"]
    assert sorted(run["name"] for run in runs) == ["first", "second"]
    assert {run["number"] for run in runs} == {1, 2}
    for number in (1, 2):
        with visitor.told(number) as told:
            assert list(told)[-1][2]["state"] in ("stopped", "finished")


def test_a_resumed_run_is_shown_at_the_place_of_its_checkpoint(tmp_path):
    Job(Bus(CheckpointHook()), work_dir=tmp_path).loop.run()
    watcher = Watcher()
    Job(Bus(watcher), epochs=4, work_dir=tmp_path).loop.run(resume="auto")
    [page] = watcher.board
    resume = wait_for(messages(iter(b"".join(page.messages.read()[0]).decode().splitlines())), "resume")
    assert (resume["epoch"], resume["iter"]) == (3, 15)


def test_runs_in_one_process_are_listed_with_the_settings_that_differ():
    page = Dashboard(port=0)
    for batch in (5, 6):
        Job(Bus(page), epochs=1, train_data=[(torch.ones(batch, 3), torch.zeros(batch, dtype=torch.long))]).loop.run()
    with Visitor(Server.at(port=0)) as visitor:
        payload = visitor.client.get("/runs.json").json()
    first, second = (str(run["number"]) for run in payload["runs"][-2:])
    assert payload["settings"]["batch_size"] | {first: 5, second: 6} == payload["settings"]["batch_size"]


def test_runs_one_after_the_other_on_an_open_bus_have_pages_of_which_the_last_ones_are_kept():
    board = Board(most_ended=2)
    with Bus(Watcher(board)) as bus:
        for epochs in (1, 2):
            Job(bus, epochs=epochs).loop.run()
    assert [(page.story.state, page.iter) for page in board] == [("finished", 5), ("finished", 10)]
    for _ in range(2):
        Job(Bus(Watcher(board)), epochs=1).loop.run()
    assert [page.number for page in board] == [2, 3, 4]
    assert board.get(1) is None


def parts():
    """A model, its optimizer, and the function that Ignite's engine calls with itself and a batch."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(engine, batch):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    return model, optimizer, update


def test_a_loop_of_ones_own_is_shown_and_controlled(server, visitor):
    model, optimizer, update = parts()
    with Run(Bus(Watcher(server.board)), model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(1000):
            for batch in run.train(DATA):
                run.report(**update(None, batch))
            if epoch == 3:
                assert visitor.post("stop").status_code == 202
    assert run.counters.epoch < 10
    with visitor.told() as told:
        heard = list(told)
    assert heard[-1][2]["state"] == "stopped"
    assert [one for _, kind, data in heard if kind == "scalars" for one in data["iter"]][:20] == list(range(1, 21))


def test_a_trainer_of_another_library_is_shown_and_controlled(server, visitor):
    ignite = pytest.importorskip("ignite.engine")
    model, optimizer, update = parts()
    engine, bus, asked = ignite.Engine(update), Bus(Watcher(server.board)), []
    attach(bus, engine, model=model, optimizer=optimizer)

    @bus.on("after_train_iter", once=3)
    def ask(event):
        asked.extend(visitor.post(*command, json={"lr": 0.5}).status_code for command in [("pause",), ("lr",)])

    @bus.on("run_paused")
    def go_on(event):
        asked.append(visitor.post("resume").status_code)

    engine.run(DATA, max_epochs=2)
    assert asked == [202, 202, 202]
    assert optimizer.param_groups[0]["lr"] == 0.5
    with visitor.told() as told:
        heard = list(told)
    assert [data["lr"] for _, kind, data in heard if kind == "lr"] == [0.5]
    assert heard[-1][2]["state"] == "finished"


def test_events_without_a_run_are_shown_and_its_buttons_say_why_they_do_nothing(server, visitor):
    with Bus(Watcher(server.board)) as bus:
        bus.publish(BeforeRun(progress=Progress()))
        bus.publish(AfterTrainIter(progress=Progress(), outputs={"loss": 1.5, "note": "text"}))
        answer = visitor.post("pause")
        bus.publish(AfterRun(progress=Progress(iter=1)))
    assert (answer.status_code, answer.json()["error"]) == (409, "these events do not belong to a Run that could be controlled")
    with visitor.told() as told:
        heard = list(told)
    assert [data["values"] for _, kind, data in heard if kind == "scalars"] == [{"loss": [1.5]}]
    assert heard[-1][2]["state"] == "finished"


def test_a_run_that_had_begun_before_is_shown_from_its_next_epoch(server):
    bus = Bus()

    @bus.on("after_train_epoch", once=2)
    def add(event):
        bus.add(Watcher(server.board))

    Job(bus, epochs=4).loop.run()
    (page,) = server.board
    assert (page.story.state, page.iter) == ("finished", 20)


def test_metrics_for_prometheus_are_served_beside_the_pages(server, visitor):
    pytest.importorskip("prometheus_client")
    with watched(server, slow=True, name="mine", val_interval=10), visitor.told() as told:
        wait_for(told, "validation")
        lines = visitor.client.get("/metrics").text
    assert re.search(r'^trainbus_iterations_total\{run="mine"\} [1-9]', lines, re.MULTILINE), lines


# ------------------------------------------------------------------------------------------------------------ the hook


@pytest.fixture
def no_servers(change):
    """No server of another test; those of this one are closed."""
    servers: dict = {}
    change(SERVERS, servers)
    yield servers
    for one in servers.values():
        one.close()


def test_hooks_with_the_same_port_share_a_server(no_servers, capfd):
    hooks = [Dashboard(port=0), Dashboard(port=0)]
    for hook in hooks:
        Job(Bus(hook), epochs=1).loop.run()
    (server,) = no_servers.values()
    assert len(list(server.board)) == 2
    assert hooks[0].url == hooks[1].url == server.url
    assert f"the dashboard is at {server.url}\n" in capfd.readouterr().err
    assert server.url == f"http://127.0.0.1:{server.port}/#token={server.token}"


def test_hooks_take_the_names_of_a_proxy_and_those_with_one_port_take_the_same(no_servers):
    Job(Bus(Dashboard(port=0, hosts=["hub.example"])), epochs=1).loop.run()
    Job(Bus(Dashboard(port=0)), epochs=1).loop.run()
    (server,) = no_servers.values()
    with Visitor(server) as visitor:
        assert visitor.client.get("/runs.json", headers={"Host": "hub.example"}).status_code == 200
    with pytest.raises(ConfigurationError, match=r"hub\.example"):
        Job(Bus(Dashboard(port=0, hosts=["*"])), epochs=1).loop.run()


def test_a_port_that_is_taken_is_an_error_and_the_default_one_gives_way(no_servers, change):
    with serving() as other:
        change(DEFAULT_PORT, other.port)
        with pytest.raises(ConfigurationError, match=f":{other.port}"):
            Job(Bus(Dashboard(port=other.port))).loop.run()
        assert Server.at().port != other.port


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({"host": host}, r"token=|non-empty") for host in ("0.0.0.0", "192.168.0.7", "::", "example.org", "")),  # noqa: S104
        *(({"hosts": [one]}, re.escape(repr(one))) for one in ("https://hub.example", "hub.example:80", "*.", "")),
        *(({"token": one}, "16") for one in ("", "short", "x" * 15, "with space " * 3, "\u00e9" * 20, "line\n" * 9)),
    ],
)
def test_another_address_needs_a_token_and_a_token_cannot_be_guessed_and_can_be_sent(options, named):
    with pytest.raises(ConfigurationError, match=named):
        Dashboard(**options)


ENDING = """
from trainbus.eventloop import Bus
from trainbus.observe import Dashboard
from tests.observe.dashboards import Job

Job(Bus(Dashboard(port=0)), slow=True).loop.run()
"""


@pytest.mark.long
def test_a_page_hears_the_end_although_the_program_ends_with_the_run(tmp_path):
    place = re.compile(r"http://127\.0\.0\.1:(\d+)/#token=(\S+)\n")
    with Script(ENDING, tmp_path) as script:
        until(lambda: place.search(script.err.read_text()))
        port, token = place.search(script.err.read_text()).groups()
        with Visitor(SimpleNamespace(port=port, token=token)) as visitor, visitor.told() as told:
            wait_for(told, "scalars")
            assert visitor.post("stop").status_code == 202
            assert wait_for(told, "state", state="stopped")
        done = script.wait(60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_is_paused_at_once_is_not_shown_as_pausing(server, monkeypatch):
    with watched(server, slow=True) as job:
        until(lambda: job.loop.counters.iter > 5)
        page = server.board.get(1)
        monkeypatch.setattr(type(page.story.run()), "pause", lambda run: page.add(Pause(time=0.0, begins=True)))
        page.command("pause")
        assert page.summary()["state"] == "paused"
