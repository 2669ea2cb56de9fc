"""The example of an application that trains: driven by a client, behind a proxy, in a browser, and ended as in Kubernetes."""

import json
import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainbus.eventloop.checkpoint import load

from ..browsers import browser as browser
from ..docs.pages import blocks
from ..proxies import jupyter, nginx
from ..scripts import Script
from ..waiting import until

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("sklearn")

SERVE = Path(__file__).parent.parent.parent / "examples" / "serve.py"
TOKEN = "a-token-of-some-length"  # noqa: S105 - of a test
LONG = 100_000  # epochs


@contextmanager
def serving(folder, name="serve"):
    """The application as a process of its own, and a client that has its token."""
    run = f"import runpy; runpy.run_path({str(SERVE)!r}, run_name='__main__')"
    with Script(run, folder, name=name, arguments=["0", folder / "out"], environment={"TOKEN": TOKEN}) as script:
        place = port_of(script)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{place}", timeout=60, trust_env=False, headers=headers) as client:
            client.port = place
            yield script, client


def port_of(script):
    pattern = re.compile(r"running on http://[0-9.]+:(\d+)")
    until(lambda: pattern.search(script.err.read_text()) or not script.process.is_alive())
    found = pattern.search(script.err.read_text())
    assert found, script.err.read_text()
    return int(found[1])


def start(client, name="first", epochs=LONG):
    answer = client.post("/trainings", json={"name": name, "epochs": epochs})
    assert answer.status_code == 201, answer.text


def until_it(client, condition, name="first"):
    """Wait until the facts of a training fulfil a condition; return them."""
    found = {}

    def look():
        found.update(client.get(f"/trainings/{name}").json())
        assert not found["failure"], found
        return condition(found)

    until(look)
    return found


def state(wanted):
    return lambda facts: facts["state"] == wanted


@pytest.mark.long
def test_trainings_are_started_watched_paused_and_stopped_by_requests(tmp_path):
    with serving(tmp_path) as (_, client):
        assert client.get("/trainings", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.post("/trainings", json={"name": "../other"}).status_code == 422
        start(client)
        start(client, "second", epochs=1)
        assert client.post("/trainings", json={"name": "second"}).status_code == 409
        until_it(client, state("running"))
        with client.stream("GET", "/trainings/first/events") as response:
            event = next(json.loads(line[6:]) for line in response.iter_lines() if line)
        assert (event["event"], "loss" in event["outputs"]) == ("after_train_iter", True)
        assert client.post("/trainings/second/pause").status_code == 409  # it waits for the first
        assert client.post("/trainings/first/pause").status_code == 202
        at = until_it(client, state("paused"))["iter"]
        assert client.get("/trainings/first").json()["iter"] == at
        client.post("/trainings/first/resume")
        until_it(client, lambda facts: facts["iter"] > at)
        client.post("/trainings/first/stop")
        stopped = until_it(client, state("stopped"))
        assert load(tmp_path / "out/first" / f"iter_{stopped['iter']}.safetensors")
        assert until_it(client, state("finished"), "second")["best"]["score"] > 0.2
        assert client.get("/health").json() == {"failures": {}}
        until(lambda: not list(tmp_path.glob("out/*/request.json")))


@pytest.mark.long
@pytest.mark.parametrize(("number", "paused"), [("SIGTERM", True), ("SIGINT", False)])
def test_a_signal_ends_streams_saves_the_training_and_the_next_start_goes_on(tmp_path, number, paused):
    with serving(tmp_path) as (script, client):
        start(client)
        start(client, "second", epochs=1)
        until_it(client, lambda facts: facts["iter"] > 3)
        with client.stream("GET", "/trainings/first/events") as events, client.stream("GET", "/training/runs/1/events") as page:
            assert any(events.iter_lines())
            lines = page.iter_lines()
            assert any(line == "event: scalars" for line in lines)
            if paused:
                client.post("/trainings/first/pause")
                assert any('"state":"paused"' in line for line in lines)
            os.kill(script.pid, getattr(signal, number))
            list(lines)
        done = script.wait(60)
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr
    saved = last_save(tmp_path)
    session = json.loads((tmp_path / "out/first/run.json").read_text())["sessions"][-1]
    assert (
        load(tmp_path / "out/first" / saved)["progress"]["iter"] == session["iter"] > 3
    )  # at the end of an epoch, it is epoch_N
    with serving(tmp_path, "again") as (script, client):
        goes_on_from(saved, script, client)
        client.post("/trainings/first/stop")
        until_it(client, state("finished"), "second")
        os.kill(script.pid, getattr(signal, number))
        assert script.wait(60).returncode == 0


@pytest.mark.long
def test_after_a_kill_the_next_start_goes_on_from_the_last_checkpoint(tmp_path):
    with serving(tmp_path) as (script, client):
        start(client)
        until(lambda: (tmp_path / "out/first/last_checkpoint").exists())
        script.kill()
        script.wait()
    assert last_save(tmp_path).startswith("epoch_")
    with serving(tmp_path, "again") as (script, client):
        goes_on_from(last_save(tmp_path), script, client)


def last_save(folder):
    return (folder / "out/first/last_checkpoint").read_text().strip()


def goes_on_from(saved, script, client):
    """The application has found the training, and goes on from a checkpoint whose name begins so."""
    until_it(client, state("running"))
    found = re.search(rf"resum.*({saved}\S*)", script.err.read_text())
    assert found, script.err.read_text()
    at = int(re.search(r"iter=(\d+)", found.string[found.start() :])[1])
    facts = until_it(client, lambda facts: facts["iter"] > at)
    assert (facts["epochs"], facts["state"]) == (LONG, "running")


@contextmanager
def behind(proxy, to, folder):
    """Addresses of the application behind a proxy, for a browser and for a client."""
    if proxy == "nginx":
        with nginx(folder, to, prefix="/team/") as port:
            yield f"http://train.test:{port}/team/training/", f"http://127.0.0.1:{port}/team"
    else:
        with jupyter(folder, token="of-jupyter") as port:  # noqa: S106 - of a test
            yield f"http://hub.test:{port}/proxy/{to}/training/?token=of-jupyter", f"http://127.0.0.1:{to}"


@pytest.mark.long
@pytest.mark.parametrize("proxy", ["nginx", "jupyter"])
def test_behind_a_proxy_a_client_and_a_browser_watch_and_control_the_trainings(tmp_path, browser, proxy):
    with serving(tmp_path) as (script, client), behind(proxy, client.port, tmp_path) as (pages, api):
        start(client)
        until_it(client, lambda facts: facts["iter"] > 3)
        tab = browser.new_page()
        tab.set_default_timeout(60_000)
        tab.goto(f"{pages}#token={TOKEN}")
        tab.wait_for_function("() => document.getElementById('state')?.textContent === 'running'")
        tab.click("#pause")
        at = until_it(client, state("paused"))["iter"]
        tab.wait_for_function("at => document.getElementById('iter').textContent === String(at)", arg=at)
        with client.stream("GET", f"{api}/trainings/first/events") as events:
            lines = events.iter_lines()
            tab.click("#pause")
            assert next(lines).startswith("data: ")
            tab.wait_for_function("at => document.getElementById('iter').textContent !== String(at)", arg=at)
            os.kill(script.pid, signal.SIGTERM)
            list(lines)
        done = script.wait(60)
        assert done.returncode == 75, done.stderr
        assert "Traceback" not in done.stderr
        tab.close()


def test_the_guides_application_tells_of_a_failed_step_and_ends_while_a_stream_is_open(tmp_path):
    found = [one for one in blocks("docs/guides/inside-asyncio.md") if one.language == "python" and "shown" not in one.marks]
    page = {"job": found[0].code, "web": next(one.code for one in found if "FastAPI(" in one.code)}
    run = f"""
        import anyio, uvicorn
        from pathlib import Path
        from trainbus import Bus, TrainLoop
        exec({page["job"]!r})
        def one_step(model, batch):
            if Path({str(tmp_path / "fail")!r}).exists():
                raise RuntimeError("broken step")
            return step(model, batch)
        bus = Bus()
        loop = TrainLoop(model, optimizer, step=one_step, train_data=train, bus=bus, max_epochs=10**6)
        exec({page["web"]!r})
        uvicorn.run(app, port=0)
    """
    for fails in (False, True):
        with Script(run, tmp_path, name=f"guide{fails}") as script:
            until(lambda script=script: re.search(r"http://[0-9.:]+", script.err.read_text()))
            place = re.search(r"http://[0-9.:]+", script.err.read_text())
            with httpx.Client(base_url=place[0], timeout=60, trust_env=False) as client:
                assert client.get("/health").status_code == 200
                with client.stream("GET", "/events") as response:
                    lines = response.iter_lines()
                    assert next(lines).startswith("data: ")
                    if fails:
                        (tmp_path / "fail").touch()
                        list(lines)  # the stream ends with the run
                        until(lambda client=client: client.get("/health").status_code == 503)
                        assert "broken step" in client.get("/health").text
                    os.kill(script.pid, signal.SIGINT)
                    list(lines)
            done = script.wait(60)
        assert done.returncode == 0, done.stderr
        assert ("broken step" in done.stderr) is fails
