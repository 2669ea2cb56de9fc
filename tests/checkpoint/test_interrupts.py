"""Ctrl-C anywhere in AsyncSaver's calls and in a plain save: nothing hangs, no file is damaged, what was taken is written."""

import atexit
import itertools
import os
import random
import threading

import pytest
import torch

from trainbus.convert import Pickled
from trainbus.eventloop.checkpoint import AsyncSaver, load, save
from trainbus.eventloop.checkpoint.background import BackgroundWriter, PendingSaves

from ..strikes import strikes_at

STRIKES = 1500


def tree(number, size=100):
    return {"w": torch.full((size,), float(number)), "n": number}


def number_of(path, read=load):
    found = read(path)
    assert (found["w"] == found["n"]).all()
    return found["n"]


def pickles(saver, number, path):
    pickled = Pickled(tree(number))
    return saver.save(pickled.storages, path, write=pickled.write)


def saves(saver, number, path):
    return saver.save(tree(number), path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("busy", "save", "read"), [*((busy, saves, load) for busy in ("wait", "skip", "replace")), ("wait", pickles, torch.load)]
)
def test_thousands_of_interrupts_of_saves_lose_no_file_and_do_not_hang(busy, save, read, tmp_path, ctrl_c, no_thread_is_left):
    delays = random.Random(5)
    futures = {}
    with AsyncSaver(busy=busy) as saver:
        for number in itertools.count():
            if ctrl_c.strikes >= STRIKES:
                break
            ctrl_c.once(delays.uniform(2e-6, 400e-6))
            call = saver.wait if number % 7 == 3 else lambda n=number: save(saver, n, tmp_path / f"{n % 40}")
            futures[number] = ctrl_c.call(call)
        ctrl_c.every(0)
        saver.wait()
        told = {number: future for number, future in futures.items() if future is not None}
        assert all(future.done() for future in told.values())
        written = {number % 40: number for number, future in sorted(told.items()) if not future.cancelled()}
        assert written
        save(saver, -1, tmp_path / "last").result(30)
        assert saver._buffer.bytes <= 3 * 400  # one is written, one waits, one is copied: no memory is lost
    for name, number in written.items():
        assert number_of(tmp_path / f"{name}", read) >= number
    assert number_of(tmp_path / "last", read) == -1
    for path in tmp_path.iterdir():
        number_of(path, read)


def lines_of(*methods):
    """Where the n-th line of these methods of AsyncSaver (from 0) is reached, Ctrl-C strikes; tells if there are as many."""
    codes = {getattr(AsyncSaver, name).__code__ for name in methods} | {BackgroundWriter.make_way.__code__}
    return lambda at, call: strikes_at(at, call, lambda frame: frame.f_code in codes)


def test_a_saver_works_after_an_interrupt_at_any_line_of_a_save(tmp_path, no_thread_is_left):
    strike = lines_of("save", "wait", "_finish", "_raise_failures")
    for busy in ("wait", "skip", "replace"):
        for at in itertools.count():
            with AsyncSaver(busy=busy) as one:
                one.save(tree(1), tmp_path / "a")
                struck = strike(at, lambda one=one: one.save(tree(2), tmp_path / "b"))
                one.wait()
                one.save(tree(3), tmp_path / "c").result(30)
            assert [number_of(tmp_path / name) for name in "ac"] == [1, 3]
            if not struck:
                break
        assert at > 10


def test_closing_again_completes_an_interrupted_close(tmp_path, no_thread_is_left):
    strike = lines_of("close", "_finish", "_raise_failures")
    for at in itertools.count():
        one = AsyncSaver()
        one.save(tree(at), tmp_path / "a")
        struck = strike(at, one.close)
        one.close()
        assert number_of(tmp_path / "a") == at
        assert one._buffer.bytes == 0
        if not struck:
            break
    assert at > 8


def test_an_interrupt_while_a_saver_waits_for_its_last_file_loses_nothing(tmp_path, monkeypatch, ctrl_c, no_thread_is_left):
    go, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: go.wait(30) and fsync(descriptor))
    one = AsyncSaver()
    one.save(tree(1), tmp_path / "a")
    for call in (one.wait, one.close, one.close):
        ctrl_c.once(0.02)
        ctrl_c.call(call)
    assert ctrl_c.strikes == 3
    go.set()
    one.close()
    assert number_of(tmp_path / "a") == 1


@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_while_a_saver_starts_its_thread_leaves_none(after, monkeypatch, no_thread_is_left):
    real = threading.Thread.start

    def start(thread):
        monkeypatch.undo()
        if after:  # as if it struck while start() waits for the thread, which runs
            real(thread)
        raise KeyboardInterrupt

    registered = atexit._ncallbacks()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        AsyncSaver()
    assert atexit._ncallbacks() == registered


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="no fdatasync")
@pytest.mark.parametrize("place", ["start", "started", "sync", "rename"])
def test_an_interrupt_of_a_plain_save_leaves_the_file_that_was_there(place, tmp_path, monkeypatch, no_thread_is_left):
    path, large = tmp_path / "a", 3_000_000  # a digest of so many bytes has a thread
    save(tree(1, large), path)
    real = threading.Thread.start

    def interrupt(*arguments):
        if place == "started":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if place == "sync":
            patch.setattr(os, "fdatasync", interrupt)
        elif place == "rename":
            patch.setattr(os, "replace", interrupt)
        else:
            patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tree(2, large), path)
    assert number_of(path) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    save(tree(3, large), path)
    assert number_of(path) == 3


def test_thousands_of_interrupts_leave_pending_saves_consistent(ctrl_c):
    delays = random.Random(7)
    pending: PendingSaves[object] = PendingSaves()

    def work():
        while True:
            pending.enter(one := object())
            pending.hold()
            pending.drop()
            pending.let_go()
            pending.enter(two := object(), can_wait=False)
            pending.enter(one)
            pending.begin()
            pending.end(one)
            pending.end(two)
            pending.wait()

    while ctrl_c.strikes < STRIKES:
        ctrl_c.every(delays.uniform(10e-6, 100e-6))  # again and again: one that comes too early strikes nothing
        ctrl_c.call(work)
        ctrl_c.every(0)
        assert pending.under_way or pending.waiting is None
        pending.let_go()
        pending.drop()
        for job in pending.under_way:
            pending.end(job)
        pending.wait()
