"""Of two processes, one tells."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainbus.observe import AlertHook

from ..waiting import until
from . import jobs


@pytest.fixture
def posted():
    """A server; its URL, and what it got."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", got
    server.shutdown()
    server.server_close()
    thread.join()


def trains(work_dir: str, url: str, fails: int | None) -> None:
    def fail(event: Any) -> None:
        if event.run.rank == fails and event.progress.iter == 3:
            raise ValueError("one process has had enough")

    loop = jobs.make_loop(work_dir, AlertHook(url, ["finished", "failed"]))
    loop.bus.on("after_train_iter", fail)
    loop.run()


def test_rank_0_tells_the_end_of_a_run(ranks, posted, tmp_path):
    url, got = posted
    ranks(trains, str(tmp_path), url, None)
    assert [(alert["kind"], alert["rank"]) for alert in got] == [("finished", 0)]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_failed_first_tells_it(outcomes, posted, tmp_path, rank):
    url, got = posted
    outcomes(trains, str(tmp_path), url, rank)
    until(lambda: got)
    assert [(alert["kind"], alert["rank"]) for alert in got] == [("failed", rank)]
    assert f"failed on rank {rank} after 3 iterations: ValueError" in got[0]["message"]
