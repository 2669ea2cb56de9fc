"""Proxies in front of a server, as people deploy them: nginx, and Jupyter with jupyter-server-proxy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from .waiting import until

_NGINX = """
daemon off;
pid nginx.pid;
error_log stderr;
worker_processes 1;
{user}
events {{}}
http {{
  access_log off;
  {folders}
  server {{
    listen 127.0.0.1:{port};
    location {prefix} {{
      proxy_pass http://127.0.0.1:{to}/;
      {lines}
    }}
  }}
}}
"""


@contextmanager
def _running(command: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A program until the end of the block; yields the file with what it prints."""
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - nginx or Jupyter, of this machine
            [*map(str, command)], cwd=folder, stdout=file, stderr=file, env=os.environ | dict(environment or {})
        )
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def nginx(folder: Path, to: int, *, prefix: str = "/", lines: str = "proxy_set_header Host $http_host;") -> Iterator[int]:
    """nginx in front of a port of this machine, at a prefix; yields its own port."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(
        _NGINX.format(
            user="user root;" if os.getuid() == 0 else "",
            folders=" ".join(f"{kind}_temp_path {folder / kind};" for kind in kinds),
            port=port,
            prefix=prefix,
            to=to,
            lines=lines,
        )
    )
    with _running([program, "-p", folder, "-c", "nginx.conf"], folder) as log:
        until(lambda: _answers(port) or "[emerg]" in log.read_text())
        assert _answers(port), log.read_text()
        yield port


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def jupyter(folder: Path, *, token: str) -> Iterator[int]:
    """A Jupyter server with jupyter-server-proxy; yields its port, where a server on port 8000 is at ``/proxy/8000/``."""
    if find_spec("jupyter_server_proxy") is None:
        pytest.skip("jupyter-server-proxy is not installed")
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("RUNTIME", "CONFIG", "DATA")}
    options = {
        "IdentityProvider.token": token,
        "ServerApp.allow_remote_access": True,  # under the name of a hub
        "ServerApp.allow_root": True,
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.jpserver_extensions": "jupyter_server_proxy=True",
        "ServerApp.open_browser": False,
        "ServerApp.port": 0,
        "ServerApp.root_dir": folder,
    }
    command = [sys.executable, "-m", "jupyter_server", *(f"--{name}={value}" for name, value in options.items())]
    with _running(command, folder, places) as log:
        found: list[int] = []

        def starts() -> bool:
            for path in (folder / "runtime").glob("jpserver-*.json"):
                with suppress(ValueError):  # it is being written
                    found.append(json.loads(path.read_text())["port"])
            return bool(found) and _answers(found[-1])

        until(starts)
        assert found, log.read_text()
        yield found[-1]
