"""The example of an application that trains: it is served under a prefix, and ends in order while pages listen."""

import os
import re
import signal
from pathlib import Path

import pytest

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
