import signal

import pytest

from .conformance import job_of


@pytest.fixture
def host(request, tmp_path, monkeypatch):
    """The class of the job of a host; its library may write files where it runs."""
    monkeypatch.chdir(tmp_path)
    interrupt = signal.getsignal(signal.SIGINT)
    yield job_of(request.param)
    signal.signal(signal.SIGINT, interrupt)  # Lightning ignores it after the first
