"""A webhook on this machine: keeps what it is sent, and fails as it is told."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .waiting import until

SECRET = "T000/B000/verysecret"  # noqa: S105


class Server(ThreadingHTTPServer):
    """Keeps the bodies of POSTs. ``answers`` has the statuses of the next ones, or functions to call in place of an answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.got, self.heads, self.answers = [], [], []
        self.released = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"

    def kinds(self):
        return [alert["kind"] for alert in self.got]

    def wait(self, number):
        until(lambda: len(self.got) >= number)
        return self.got


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if callable(answer):
            answer()
            return
        if answer == 200:
            self.server.got.append(body)
            self.server.heads.append((self.path, dict(self.headers)))
        self.send_response(answer)
        if 300 <= answer < 400:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        raise AssertionError("a POST became a GET")

    def log_message(self, *arguments): ...
