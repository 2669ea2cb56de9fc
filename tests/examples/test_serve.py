"""The example of an application that trains: it is served under a prefix, and ends in order while pages listen."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("paused", [False, True])
def test_ctrl_c_ends_the_run_in_order_although_a_page_listens(tmp_path, paused):
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "examples/serve.py", "0", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed = []
        for line in process.stderr:
            printed.append(line)
            if place := re.search(r"http://[0-9.:]+", line):
                break
        else:
            pytest.fail("".join(printed))
        with httpx.Client(base_url=f"{place[0]}/training", timeout=60, trust_env=False) as client:
            while not client.get("/runs.json").json()["runs"]:
                continue
            with client.stream("GET", "/runs/1/events") as response:
                lines = response.iter_lines()
                assert any(line == "event: scalars" for line in lines)
                if paused:
                    assert client.post("/runs/1/pause").status_code == 202
                    assert any('"state":"paused"' in line for line in lines)
                process.send_signal(signal.SIGINT)
                list(lines)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert (tmp_path / "last_checkpoint").exists()
