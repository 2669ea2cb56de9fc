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
    """A socket bound to a free port."""
    one = socket.socket()
    one.bind(("127.0.0.1", 0))
    one.listen()
    return one


@contextmanager
def served(serve, work_dir, *, patience=5, **options):
    """The application on a real server in a thread; yields a client of it."""
    trainer = serve.Trainer(work_dir, **options)
    server = serve.Server(trainer, patience=patience)
    with bound_socket() as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="server")
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=30, trust_env=False) as client:
                client.trainer, client.server, client.thread = trainer, server, thread
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


def test_the_page_loads_during_training(serve, tmp_path):
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


def test_late_and_reconnecting_clients_get_all_events(serve, tmp_path):
    with served(serve, tmp_path, epochs=1) as client:
        with told(client) as messages:
            all_of_it = list(messages)
        with told(client) as messages:
            assert list(messages) == all_of_it
        with told(client, **{"Last-Event-ID": "2"}) as messages:
            assert list(messages) == all_of_it[3:]


def test_pause_holds_the_run_after_its_iteration_until_resume(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        post(client, "/pause")
        counters = client.trainer.loop.counters
        most = wait_for(messages, "changed", paused=True)["iter"] + 1  # the iteration under way is finished
        for _ in range(20):
            assert client.get("/").status_code == 200
            assert counters.iter <= most
        post(client, "/resume")
        wait_for(messages, "changed", paused=False)
        while wait_for(messages, "scalars")["iter"] <= most:  # those from before may come by only now
            continue


def test_a_new_learning_rate_is_set_at_an_iteration_and_kept(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        assert wait_for(messages, "scalars")["lr"] == 1e-3
        post(client, "/lr", json={"lr": 0.004})
        begun = wait_for(messages, "changed", lr=0.004)["iter"]
        rates = []
        while len(rates) < 20:
            data = wait_for(messages, "scalars")
            if data["iter"] > begun + 1:  # the iteration under way has the rate that it began with
                rates.append(data["lr"])
        assert set(rates) == {0.004}


NUMBERS = ['"fast"', '"0.1"', "null", "true", "-1", "0", "7", "NaN", "Infinity", "1e999", "9" * 200, "[0.1]"]
REFUSED = {
    422: ["", "{}", "[1]", "[" * 256, '{"a":' * 50, b"\xff\xfe", *(f'{{"lr": {number}}}' for number in NUMBERS)],
    413: [f'{{"lr": {"9" * 5000}}}', "[" * 100_000, '{"a":' * 100_000, b"x" * 10_000_000],
}


def test_an_invalid_learning_rate_is_refused(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        for status, bodies in REFUSED.items():
            for body in bodies:
                assert client.post("/lr", content=body).status_code == status, body[:50]
        assert "between 0 and 1" in client.post("/lr", content="7").json()["error"]


def test_the_last_event_id_of_a_browser_is_bounded(serve, tmp_path):
    with served(serve, tmp_path, epochs=1) as client:
        for seen in ("9" * 5000, "-1", "x", "\u00b2", ""):
            with told(client, **{"Last-Event-ID": seen.encode("latin-1")}) as messages:
                assert next(messages)[0] == "hello"


def test_requests_for_another_host_are_refused(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "a:b:c", "localhost.evil"):
            for method, path in [("GET", "/"), ("GET", "/events"), ("POST", "/stop")]:
                assert client.request(method, path, headers={"Host": host}).status_code == 400, (host, path)


def test_commands_of_other_sites_are_refused_and_own_ones_accepted(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        ours = str(client.base_url).rstrip("/")
        port = ours.rpartition(":")[2]
        for origin in (
            "http://evil.example",
            "null",
            "",
            f"http://evil.example:{port}",
            "http://127.0.0.1:1",
            f"x{ours}.evil",
            "http://[",
        ):
            for path in ("/stop", "/pause", "/lr"):
                response = client.post(path, headers={"Origin": origin}, json={"lr": 0.5})
                assert response.status_code == 403, (origin, path)
        assert not client.trainer.over
        post(client, "/pause", headers={"Origin": ours})
        post(client, "/resume")
        host = f"localhost:{port}"
        post(client, "/pause", headers={"Host": host, "Origin": f"http://{host}"})


def test_other_sites_cannot_embed_the_page(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        assert client.get("/").headers["x-frame-options"] == "DENY"


def test_an_interrupted_request_is_not_a_server_error(serve, tmp_path, capfd):
    with served(serve, tmp_path, epochs=1000) as client:
        head = b"POST /lr HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(head)
        assert client.get("/").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_does_not_read_blocks_nothing(serve, tmp_path):
    with served(serve, tmp_path, patience=1, epochs=1000) as client:
        for _ in range(100):
            client.trainer.bulletin._messages.append(b"data: " + b"x" * 100_000 + b"\n\n")
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
            assert client.get("/").status_code == 200
            client.server.should_exit = True
            client.thread.join(20)
            assert not client.thread.is_alive()


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
def test_stop_ends_the_run_cleanly_and_the_server_continues(serve, tmp_path, paused):
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


def test_an_unknown_command_is_refused(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client:
        assert client.post("/launch").status_code == 404


def test_a_failed_run_is_reported_and_the_server_continues(serve, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with served(serve, blocked, epochs=2) as client, told(client) as messages:
        end = wait_for(messages, "over")
        assert end["state"] == "failed"
        assert "ConfigurationError" in end["message"]
        assert client.get("/").status_code == 200


def test_shutdown_ends_the_run_cleanly_with_connected_clients(serve, tmp_path):
    with served(serve, tmp_path, epochs=1000) as client, told(client) as messages:
        wait_for(messages, "scalars")
        post(client, "/pause")
        wait_for(messages, "changed", paused=True)
        client.server.should_exit = True  # as its signal handler does
        assert wait_for(messages, "over")["state"] == "stopped"
    assert (tmp_path / "last_checkpoint").exists()


def test_the_command_serves_until_ctrl_c_ends_it_cleanly(tmp_path):
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
