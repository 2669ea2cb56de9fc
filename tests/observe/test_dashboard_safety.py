"""Who reaches the dashboard, and what readers cost: other sites, other names, no token, a slow reader, 200 readers."""

from __future__ import annotations

import itertools
import re
import socket
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

from trainbus.eventloop import Bus, ConfigurationError
from trainbus.observe import dashboard
from trainbus.observe.dashboard import Board, Server, Watcher, app

from ..waiting import on_threads, until
from .dashboards import Job, Visitor, serving, wait_for, watched

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from trainbus.observe.dashboard import event_stream  # noqa: E402 - needs starlette

COMMANDS = ("pause", "resume", "stop", "checkpoint", "lr")
FOLDER = str(Path(dashboard.__file__).parent)
STATIC = Path(dashboard.__file__).with_name("static")


# ------------------------------------------------------------------------------------------------------------- the token


TOKENS = [None, "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x", "Bearer \xe4"]


@pytest.mark.long
def test_a_command_needs_the_token_and_looking_does_not(server):
    with watched(server, slow=True) as job, Visitor(server, token=False) as visitor:
        for given in TOKENS:
            headers = {} if given is None else {"Authorization": given.format(token=server.token).encode("latin-1")}
            for command in COMMANDS:
                answer = visitor.post(command, json={"lr": 0.5}, headers=headers)
                assert answer.status_code == 403, (given, command)
                assert "needs the token" in answer.json()["error"]
            assert visitor.client.get("/runs.json", headers=headers).json()["may_change"] is False, given
            with visitor.told(**headers) as told:
                assert wait_for(told, "scalars"), given
        assert visitor.client.post(f"/runs/1/stop?token={server.token}").status_code == 403
        assert not job.loop._running.state.own.paused
        assert not job.loop._running.state.own.stop


def test_at_another_address_nothing_of_the_run_is_shown_without_the_token():
    with serving("0.0.0.0", "a-token-of-some-length") as server, watched(server, slow=True), Visitor(server) as visitor:  # noqa: S104
        with Visitor(server, token=False) as stranger:
            for path in ("/runs.json", "/runs/1/events", "/runs/2/events"):
                assert stranger.client.get(path).status_code == 401, path
            assert stranger.post("stop").status_code == 401
            assert stranger.client.get("/runs/1/").status_code == 200  # the empty page, whose script asks with the token
            assert stranger.client.get("/static/run.js").status_code == 200
        headers = {"Host": "train.example:30080"}  # in a container no one here knows it
        assert visitor.client.get("/runs.json", headers=headers).status_code == 200
        assert visitor.client.get("/runs.json").json()["may_change"] is True
        with visitor.told() as told:
            wait_for(told, "scalars")


def test_under_the_names_of_a_proxy_nothing_of_the_run_is_shown_without_the_token():
    with serving(hosts=["hub.example"]) as server, watched(server, slow=True), Visitor(server) as visitor:
        for host, told in (("hub.example", 200), ("localhost", 200), ("evil.example", 400)):
            assert visitor.client.get("/runs.json", headers={"Host": host}).status_code == told
        with Visitor(server, token=False) as stranger:
            for host in ("hub.example", "localhost"):
                assert stranger.client.get("/runs.json", headers={"Host": host}).status_code == 401


# ------------------------------------------------------------------------------------------------- other sites and names


OTHER_NAMES = [
    *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example"),
    *("", "a:b:c", "localhost.evil", "127.0.0.1@evil", "[::1].x"),
]
REQUESTS = [("GET", "/"), ("GET", "/runs.json"), ("GET", "/runs/1/events"), ("POST", "/runs/1/stop")]


@pytest.mark.long
def test_requests_for_another_name_are_refused_so_that_no_name_is_rebound(server, visitor):
    with watched(server, slow=True) as job:
        for host, (method, path) in itertools.product(OTHER_NAMES, REQUESTS):
            answer = visitor.client.request(method, path, headers={"Host": host.format(port=server.port)})
            assert answer.status_code == 400, (host, path)
        for host in ("localhost:{port}", "LOCALHOST", "127.0.0.1", "[::1]:{port}"):
            assert visitor.client.get("/runs.json", headers={"Host": host.format(port=server.port)}).status_code == 200, host
        assert job.thread.is_alive()


FOREIGN = [
    *({"Origin": origin} for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1", "http://[")),
    *(
        {"Origin": origin}
        for origin in ("http://evil.example:{port}", "http://127.0.0.1:{port}.evil", "xhttp://127.0.0.1:{port}/")
    ),
    *({"Sec-Fetch-Site": site} for site in ("cross-site", "same-site")),
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:{port}"},
]
FORM = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}  # sent by a form of another page, or by its link


@pytest.mark.long
def test_what_pages_of_other_sites_send_is_refused_even_with_the_token_and_the_own_page_is_heard(server, visitor):
    with watched(server, slow=True) as job:
        for foreign in FOREIGN:
            headers = {name: value.format(port=server.port) for name, value in foreign.items()}
            for command in COMMANDS:
                assert visitor.post(command, json={"lr": 0.5}, headers=headers).status_code == 403, (foreign, command)
            assert visitor.client.get("/runs/1/events", headers=headers).status_code == 403, foreign
        assert job.thread.is_alive()
        ours = {"Origin": f"http://127.0.0.1:{server.port}", "Sec-Fetch-Site": "same-origin"}
        assert visitor.post("pause", headers=ours).status_code == 202
        proxied = {"Origin": "https://train.example", "Sec-Fetch-Site": "same-origin"}  # the proxy names us 127.0.0.1
        assert visitor.post("resume", headers=proxied).status_code == 202
        assert visitor.post("resume").status_code == 202  # curl says nothing of where it comes from
        assert visitor.client.get("/", headers=FORM).status_code == 200
        assert visitor.post("stop", headers=FORM).status_code == 403


def test_no_other_site_is_told_that_it_may_read_or_frame_and_the_token_is_in_no_answer(server, visitor):
    with watched(server) as job:
        job.thread.join(60)
        for path in ("/runs.json", "/static/common.js"):
            assert server.token not in visitor.client.get(path).text
        for method, path in [*REQUESTS, ("GET", "/runs/1/"), ("OPTIONS", "/runs/1/stop"), ("GET", "/no")]:
            asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            answer = visitor.client.request(method, path, headers=asks if method == "OPTIONS" else {})
            assert not [name for name in answer.headers if name.startswith("access-control-")]
            assert server.token not in answer.text
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy


def test_the_pages_need_nothing_from_elsewhere_and_no_absolute_path():
    for path in STATIC.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://", text), path
        assert not re.search(r"""(?:href|src|fetch|ask)\s*[=(]\s*["'`]/""", text), path
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", text), (
                f"{path}: the policy forbids code in the page"
            )


# ------------------------------------------------------------------------------------------------ what readers cost


def calls_on_the_training_thread(board):
    """Count the functions of the dashboard that the training thread calls in a run of 15 iterations."""
    calls, job = Counter(), Job(Bus(Watcher(board)))

    def watch(frame, kind, argument):
        if kind == "call" and frame.f_code.co_filename.startswith(FOLDER):
            calls[frame.f_code.co_name] += 1

    def train(_):
        sys.setprofile(watch)
        try:
            job.loop.run()
        finally:
            sys.setprofile(None)

    on_threads(train, 0)
    return calls


async def _with_readers(server, number, act):
    limits = httpx.Limits(max_connections=number + 1)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", timeout=60, trust_env=False, limits=limits
    ) as client:
        done = []

        async def read():
            async with client.stream("GET", "/runs/1/events") as response:
                done.append(response.status_code)
                async for _ in response.aiter_lines():
                    pass

        async with anyio.create_task_group() as tasks:
            for _ in range(number):
                tasks.start_soon(read)
            with anyio.fail_after(60):
                while len(done) < number:
                    await anyio.sleep(0.01)
            result = await anyio.to_thread.run_sync(act)
            tasks.cancel_scope.cancel()
        assert set(done) == {200}
        return result


@pytest.mark.long
def test_200_readers_give_the_training_thread_nothing_to_do(server, visitor):
    alone = calls_on_the_training_thread(Board())
    with watched(server, slow=True) as job:
        with_readers = anyio.run(_with_readers, server, 200, lambda: calls_on_the_training_thread(server.board))
        assert job.thread.is_alive()
    for calls in (alone, with_readers):
        del calls["over"]  # the board looks which of its pages have ended
    assert with_readers == alone
    # The page of the run is made, and events are handed over: nothing for each iteration.
    assert not {"add", "read", "_post_scalars"} & alone.keys()
    assert max(alone.values()) < 15
    assert alone["post"] <= 2


def test_a_reader_that_does_not_read_is_cut_off_and_holds_up_nobody(server, visitor, change):
    change(event_stream.PATIENCE, 0.5)
    with watched(server, slow=True) as job:
        page = server.board.get(1)
        for _ in range(100):
            page.note("asked", what="x" * 200_000)
        connections = server._server.server_state.connections
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"GET /runs/1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(10).startswith(b"HTTP/1.1 2")
            ours = connection.getsockname()
            assert ours in {one.client for one in connections}
            assert visitor.client.get("/").status_code == 200
            before = job.loop.counters.iter
            until(lambda: ours not in {one.client for one in list(connections)})
            until(lambda: job.loop.counters.iter > before)
        readers = server._server.config.app._readers
        until(lambda: readers.number == 0)
        readers.number = 500
        answer = visitor.client.get("/runs/1/events")
        assert (answer.status_code, answer.json()["error"][:18]) == (503, "500 pages are open")


def test_an_interrupted_request_is_not_an_error_of_the_server(server, visitor, capfd):
    with watched(server, slow=True):
        head = f"POST /runs/1/lr HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}\r\n"
        head += "Content-Length: 50\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode())
        assert visitor.client.get("/").status_code == 200
    server.close()
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------ mounted in an application of the user


def mounted(*watched, **options):
    from starlette.applications import Starlette

    outer = Starlette()
    outer.mount("/deep/training", app(*watched, **options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://localhost", follow_redirects=True)


@pytest.mark.anyio
async def test_mounted_under_a_prefix_it_shows_the_run(anyio_backend):
    job = Job()
    async with mounted(job.loop) as client:
        job.loop.run()
        assert "<title>Runs · trainbus</title>" in (await client.get("/deep/training")).text
        page = await client.get("/deep/training/runs/1")
        assert page.history[0].headers["location"] == "1/"  # whatever stands in front of it at a proxy
        assert str(page.url).endswith("/deep/training/runs/1/")
        for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            if not path.startswith("data:"):
                assert (await client.get(page.url.join(path))).status_code == 200, path
        events = (await client.get("/deep/training/runs/1/events")).text
        assert '"state":"finished"' in events.splitlines()[-2]
        # without token= and may_change= it only shows
        answer = await client.post("/deep/training/runs/1/stop", headers={"Authorization": "Bearer None"})
        assert (answer.status_code, answer.json()["error"][:33]) == (403, "this dashboard only shows the run")
        assert (await client.get("/deep/training/runs.json")).json()["changes"] == "nobody"


@pytest.mark.anyio
async def test_the_applications_own_authentication_decides(anyio_backend):
    with Job(slow=True) as job:
        async with mounted(job.loop, may_change=lambda request: request.headers.get("x-user") == "admin") as client:
            job.bus.internal.count_calls()
            with anyio.fail_after(30):
                while not (await client.get("/deep/training/runs.json")).json()["runs"]:
                    await anyio.sleep(0.01)
            answer = await client.post("/deep/training/runs/1/stop", headers={"x-user": "guest"})
            assert (answer.status_code, answer.json()["error"]) == (403, "the application does not allow you to change the run")
            assert (await client.post("/deep/training/runs/1/stop", headers={"x-user": "admin"})).status_code == 202
            assert (
                await client.post("/deep/training/runs/1/stop", headers={"x-user": "admin", "Origin": "http://evil"})
            ).status_code == 403


@pytest.mark.anyio
async def test_a_name_that_is_not_listed_is_refused_with_the_way_out(anyio_backend):
    cases = {
        "lab.example": {"Lab.Example:8443": 200, "x.lab.example": 400, "localhost": 400},
        "*.lab.example": {"a.lab.example": 200, "a.b.LAB.example:1": 200, "lab.example": 400, "evillab.example": 400},
        "[fd00::1]": {"[fd00::1]:80": 200, "[fd00::2]": 400},
    }
    for hosts, told in cases.items():
        async with mounted(Bus(), hosts=[hosts]) as client:
            for host, status in told.items():
                assert (await client.get("/deep/training/", headers={"Host": host})).status_code == status, (hosts, host)
    async with mounted(Bus()) as client:
        answer = await client.get("/deep/training/", headers={"Host": "lab.example"})
        assert answer.json()["error"] == "the dashboard is not served under the name 'lab.example'; list it in hosts="


@pytest.mark.anyio
async def test_with_a_token_that_is_needed_to_see_anything_any_name_may_be_allowed(anyio_backend):
    token = "a-token-of-some-length"  # noqa: S105 - a test
    async with mounted(Bus(), hosts="*", token=token) as client:
        headers = {"Host": "any.example"}
        assert (await client.get("/deep/training/", headers=headers)).status_code == 200  # the empty page
        assert (await client.get("/deep/training/runs.json", headers=headers)).status_code == 401
        headers["Authorization"] = f"Bearer {token}"
        assert (await client.get("/deep/training/runs.json", headers=headers)).status_code == 200


def test_what_cannot_be_shown_is_an_error():
    with pytest.raises(ConfigurationError, match=r"token=.*may_change="):
        app(Bus(), token="a-token-of-some-length", may_change=lambda request: True)  # noqa: S106 - a test
    with pytest.raises(ConfigurationError, match="3"):
        app(3)
    with pytest.raises(ConfigurationError, match="16"):
        app(Bus(), token="short")  # noqa: S106 - a test
    with pytest.raises(ConfigurationError, match=r"rebinding.*token="):
        app(Bus(), hosts=["*"])
    for name in ("https://lab.example", "lab.example:80", "lab.example/training", "lab*.example", ""):
        with pytest.raises(ConfigurationError, match=re.escape(repr(name))):
            app(Bus(), hosts=[name])


def test_without_the_extra_the_error_names_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "starlette"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == "starlette":
                raise ModuleNotFoundError("No module named 'starlette'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    for name in ("application", "guard"):
        monkeypatch.delitem(sys.modules, f"trainbus.observe.dashboard.{name}", raising=False)
    for make in (lambda: app(Bus()), lambda: Server("127.0.0.1", 0, None)):
        with pytest.raises(ConfigurationError, match=r"starlette.*trainbus\[web\]"):
            make()
