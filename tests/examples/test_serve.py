import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from eventloop.checkpoint import load

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parent.parent.parent


def bound_socket():
    """A socket on a free port, bound before anybody else can take it."""
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    one.listen()
    return one


@contextmanager
def served(serve, work_dir, **options):
    """The application on a real server in a thread; yields a client of it."""
    trainer = serve.Trainer(work_dir, **options)
    server = serve.Server(trainer)
    with bound_socket() as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30, trust_env=False) as client:
                client.trainer, client.server = trainer, server
                yield client
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive(), "the server does not end"


@contextmanager
def told(client, **headers):
    """What the server tells a visitor from now on: an iterator of (kind, data)."""

    def messages(lines):
        kind = ""
        for line in lines:
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "data":
                yield kind, json.loads(value)

    with client.stream("GET", "/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield messages(response.iter_lines())


def wait_for(messages, wanted, **values):
    for kind, data in messages:
        if kind == wanted and all(data[key] == value for key, value in values.items()):
            return data
    raise AssertionError(f"the stream ended without {wanted} {values}")


def post(client, path, **options):
    response = client.post(path, **options)
    assert response.status_code == 202, response.text


@pytest.fixture
def serve(example):
    return example("serve")


def test_the_page_loads_while_training_goes_on(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        for part in ("<canvas", 'id="pause"', 'id="stop"', 'id="checkpoint"', 'id="rate"', 'EventSource("events")'):
            assert part in page.text
        assert "http" not in page.text  # nothing from elsewhere
        wait_for(messages, "scalars")


def test_scalars_metrics_and_checkpoints_come_as_server_sent_events_in_order(serve, tmp_path):
    with served(serve, tmp_path, epochs=3) as client, told(client) as messages:
        heard = list(messages)
    assert heard[0] == ("hello", {"epochs": 3, "work_dir": str(tmp_path)})
    assert heard[-1] == ("over", {"state": "finished", "message": "", "iter": 102})
    scalars = [data for kind, data in heard if kind == "scalars"]
    assert [data["iter"] for data in scalars] == list(range(2, 103, 2))
    assert all(math.isfinite(data["loss"]) and data["lr"] == 1e-3 for data in scalars)
    assert scalars[-1]["loss"] < scalars[0]["loss"]
    assert [data["iter"] for kind, data in heard if kind == "metrics"] == [34, 68, 102]
    assert all(0 <= data["accuracy"] <= 1 for kind, data in heard if kind == "metrics")
    names = [name for kind, data in heard if kind == "checkpoint" for name in data["names"]]
    assert "epoch_3.safetensors" in names


def test_who_comes_late_or_comes_back_misses_nothing(serve, tmp_path):
    with served(serve, tmp_path, epochs=1) as client:
        with told(client) as messages:
            all_of_it = list(messages)
        with told(client) as messages:
            assert list(messages) == all_of_it
        with told(client, **{"Last-Event-ID": "2"}) as messages:
            assert list(messages) == all_of_it[3:]


def test_pause_holds_the_run_before_an_iteration_and_resume_lets_it_go_on(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        post(client, "/pause")
        held = wait_for(messages, "changed", paused=True)["iter"]
        counters = client.trainer.loop.counters
        assert counters.iter == held
        assert client.get("/").status_code == 200
        assert counters.iter == held
        post(client, "/resume")
        assert wait_for(messages, "changed", paused=False)["iter"] == held
        while wait_for(messages, "scalars")["iter"] <= held:  # those from before may come by only now
            continue


def test_a_new_learning_rate_arrives_with_an_iteration_and_stays(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        assert wait_for(messages, "scalars")["lr"] == 1e-3
        post(client, "/lr", json={"lr": 0.004})
        begun = wait_for(messages, "changed", lr=0.004)["iter"]
        rates = []
        while len(rates) < 20:
            data = wait_for(messages, "scalars")
            if data["iter"] > begun:
                rates.append(data["lr"])
        assert set(rates) == {0.004}


@pytest.mark.parametrize("body", ["", "{}", '{"lr": "fast"}', '{"lr": null}', '{"lr": -1}', '{"lr": 7}', "[1]", '{"lr": NaN}'])
def test_a_learning_rate_that_is_none_is_refused(serve, tmp_path, body):
    with served(serve, tmp_path, epochs=1000) as client:
        response = client.post("/lr", content=body)
        assert response.status_code == 422
        assert "between 0 and 1" in response.json()["error"]


def test_checkpoint_now_leaves_a_file_that_loads(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        post(client, "/checkpoint")
        while True:
            (name, *_) = wait_for(messages, "checkpoint")["names"]
            if name.startswith("iter_"):
                break
        assert load(tmp_path / name)["progress"]["iter"] == int(name.removeprefix("iter_").removesuffix(".safetensors"))


@pytest.mark.parametrize("paused", [False, True])
def test_stop_ends_the_run_in_order_and_the_server_goes_on(serve, tmp_path, paused):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        if paused:
            post(client, "/pause")
            wait_for(messages, "changed", paused=True)
        post(client, "/stop")
        end = wait_for(messages, "over")
        assert end["state"] == "stopped"
        assert list(messages) == []
        assert (tmp_path / "last_checkpoint").exists()
        assert client.post("/pause").status_code == 409
        assert client.get("/").status_code == 200


def test_an_unknown_command_is_none(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        assert client.post("/launch").status_code == 404


def test_a_run_that_fails_is_told_and_the_server_goes_on(serve, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with served(serve, blocked, epochs=2) as client, told(client) as messages:
        end = wait_for(messages, "over")
        assert end["state"] == "failed"
        assert "ConfigurationError" in end["message"]
        assert client.get("/").status_code == 200


def test_shutting_down_ends_the_run_in_order_with_visitors_listening(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        client.trainer.control.pause()
        wait_for(messages, "changed", paused=True)
        client.server.should_exit = True  # as its signal handler does
        assert wait_for(messages, "over")["state"] == "stopped"
    assert (tmp_path / "last_checkpoint").exists()


def test_the_one_command_serves_and_ctrl_c_ends_it_in_order(tmp_path):
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "examples/serve.py", "--port", "0", "--epochs", "1000", "--pace", "0", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        place = re.search(r"http://[0-9.:]+", process.stderr.readline())
        assert place, process.stderr.read()
        with httpx.Client(base_url=place[0], timeout=30, trust_env=False) as client, told(client) as messages:
            wait_for(messages, "scalars")
            process.send_signal(signal.SIGINT)
            assert wait_for(messages, "over")["state"] == "stopped"
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert (tmp_path / "last_checkpoint").exists()
