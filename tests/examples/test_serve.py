"""The example of an application that trains: it is served under a prefix, and ends in order while pages listen."""

import os
import re
import signal
from pathlib import Path

import pytest

from ..docs.pages import blocks
from ..scripts import Script
from ..waiting import until

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("sklearn")

SERVE = Path(__file__).parent.parent.parent / "examples" / "serve.py"


@pytest.mark.parametrize("paused", [False, True])
def test_ctrl_c_ends_the_run_in_order_although_a_page_listens(tmp_path, paused):
    run = f"import runpy; runpy.run_path({str(SERVE)!r}, run_name='__main__')"
    with Script(run, tmp_path, arguments=["0", tmp_path]) as script:
        until(lambda: re.search(r"http://[0-9.:]+", script.err.read_text()))
        place = re.search(r"http://[0-9.:]+", script.err.read_text())

        with httpx.Client(base_url=f"{place[0]}/training", timeout=60, trust_env=False) as client:
            while not client.get("/runs.json").json()["runs"]:
                continue
            with client.stream("GET", "/runs/1/events") as response:
                lines = response.iter_lines()
                assert any(line == "event: scalars" for line in lines)
                if paused:
                    assert client.post("/runs/1/pause").status_code == 202
                    assert any('"state":"paused"' in line for line in lines)
                os.kill(script.pid, signal.SIGINT)
                list(lines)
        done = script.wait(60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "last_checkpoint").exists()


def test_the_guides_application_tells_of_a_failed_step_and_ends_while_a_stream_is_open(tmp_path):
    pytest.importorskip("fastapi")
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
