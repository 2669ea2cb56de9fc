import os
import platform
import signal
import subprocess
import threading

import pytest

from trainbus.observe import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, as the working folder."""
    (tmp_path / "train.py").write_text("first")
    ada = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], [*ada, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)  # noqa: S603, S607
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_and_whether_files_were_changed(repository):
    first = environment().git
    assert first is not None
    assert (len(first.commit), first.branch, first.clean) == (40, "trunk", True)
    (repository / "train.py").write_text("second")
    second = environment().git
    assert second is not None
    assert (second.commit, second.clean) == (first.commit, False)


def test_outside_a_repository_and_without_git_there_is_no_commit(repository, tmp_path_factory, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert environment().git is None
    folder = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
    monkeypatch.chdir(folder)
    assert environment().git is None


def test_a_process_that_is_forked_meanwhile_does_not_hold_it_up(repository, monkeypatch):
    """A DataLoader's worker inherits every pipe that is open, and keeps it open as long as it lives."""
    pipe, children = os.pipe, []

    def pipe_and_fork():
        ends = pipe()
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        return ends

    found = []
    asking = threading.Thread(target=lambda: found.append(environment()), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "_uname_cache", None)  # as in a new process
        patch.setattr(platform, "_platform_cache", {})
        patch.setattr(os, "pipe", pipe_and_fork)
        asking.start()
        asking.join(timeout=10)
        held_up = asking.is_alive()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    asking.join()
    assert not held_up
    assert found[0].git.branch == "trunk"
