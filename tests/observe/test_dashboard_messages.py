"""The messages of a run in bounded memory, and the stream that tells them, on every event loop."""

from __future__ import annotations

import json
import re

import anyio
import pytest

from trainbus.observe.dashboard import Board
from trainbus.observe.dashboard.message_log import MessageLog

pytest.importorskip("starlette")

from trainbus.observe.dashboard import event_stream


def told(messages):
    return b"".join(messages).decode()


def iterations(messages):
    return [int(one) for columns in re.findall(r'"iter":\[([\d,]*)\]', told(messages)) for one in columns.split(",")]


def columns_of(messages):
    """Return the bins' width, and of each scalar its iterations and values, as the page reads them."""
    width, curves = 1, {}
    for text in re.findall(r"event: scalars\ndata: (.*)\n", told(messages)):
        columns = json.loads(text)
        width = max(width, columns["width"])
        for name, values in columns["values"].items():
            places = columns["at"].get(name, range(len(columns["iter"])))
            curve = curves.setdefault(name, {})
            curve |= {columns["iter"][place]: value for place, value in zip(places, values, strict=True)}
    return width, curves


@pytest.mark.long
def test_a_long_run_keeps_bounded_memory_and_the_least_and_greatest_of_each_part():
    one = MessageLog()
    one.post("hello", {"name": "long"})
    losses = {number: 1.0 + number * 7919 % 101 / 1000 for number in range(1, 100_001)} | {40_007: 900.0, 70_001: -5.0}
    for begin in range(0, 100_000, 250):
        one.add(
            (number, 1, 0.0, {"loss": losses[number]} | ({"rare": losses[number]} if number % 1000 == 0 else {}))
            for number in range(begin + 1, begin + 251)
        )
        one.post("metrics", {"at": begin})
    messages, number, over = one.read()
    width, curves = columns_of(messages)
    kept = curves["loss"]
    assert 1000 < len(kept) <= 4000
    assert {1, 100_000, 40_007, 70_001} <= kept.keys()
    for begin in range(width, 100_000 - width, width):  # the same in each bin, old or new
        own = range(begin, begin + width)
        assert {min(losses[at] for at in own), max(losses[at] for at in own)} <= {kept[at] for at in own if at in kept}
    assert curves["rare"] == {at: losses[at] for at in range(1000, 100_001, 1000)}  # its own points count
    assert number == 1 + 100_000 + 400
    assert not over
    assert told(messages).startswith("id: 1\nevent: hello\n")


def test_points_of_one_iteration_are_thinned_too():
    one = MessageLog()
    one.add((7, 1, 0.0, {"loss": float(number % 10)}) for number in range(5000))
    assert len(one.points()) <= 4


def test_notes_are_bounded_and_the_first_one_stays():
    one = MessageLog()
    for number in range(5000):
        one.post("note" if number else "hello", {"number": number})
        if number == 1:
            one.post("files", {"written": 3}, replace=True)
    messages, number, _ = one.read()
    assert len(messages) == 2000
    assert '"number":0' in told(messages[:1])
    assert '"written":3' in told(messages[1:2])  # what is replaced says how things are, and stays
    assert '"number":4999' in told(messages[-1:])
    assert number == 5001


def test_what_is_replaced_after_the_end_is_new_for_readers_to_come():
    one = MessageLog()
    for kind in ("hello", "files"):
        one.post(kind, {"written": 3}, replace=True)
    one.post("state", {"state": "finished"}, last=True)
    one.post("files", {"written": 2}, replace=True)
    one.post("costs", {}, replace=True)
    messages, number, over = one.read()
    assert told(messages[1:2]) == 'id: 2\nevent: files\ndata: {"written":2}\n\n'
    assert (len(messages), number, over) == (3, 3, True)


def test_numbers_that_are_not_finite_are_null_texts_are_left_out_and_names_are_bounded():
    one = MessageLog()
    one.add([(1, 1, 0.0, {"loss": float("nan"), "other": float("inf"), "text": "x"})])
    assert '"values":{"loss":[null],"other":[null]}' in told(one.read()[0])
    one.add([(2, 1, 0.0, {f"name{number}": 1.0 for number in range(1000)})])
    assert len(one._names) == 64


def test_a_reader_gets_what_it_has_not_seen_the_last_of_what_is_replaced_and_nothing_after_the_end():
    one = MessageLog()
    one.add((number, 1, 0.0, {"loss": float(number)}) for number in range(1, 11))
    assert iterations(one.read(7)[0]) == [8, 9, 10]
    for wall in range(5):
        one.post("costs", {"wall": wall}, replace=True)
    assert told(one.read(10)[0]) == 'id: 15\nevent: costs\ndata: {"wall":4}\n\n'
    one.post("state", {"state": "finished"}, last=True)
    one.post("note", {})
    one.add([(1, 1, 0.0, {"loss": 1.0})])
    messages, _, over = one.read(15)
    assert (len(messages), over) == (1, True)


# ------------------------------------------------------------------------------- the stream, on every event loop


class Reader:
    """The server's side of one connection, for an ASGI application."""

    def __init__(self, *, stuck_after: int | None = None):
        self.body, self.done, self.parts = b"", False, 0
        self.stuck_after = stuck_after
        self.left = anyio.Event()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.parts += 1
        if self.stuck_after is not None and self.parts > self.stuck_after:
            await anyio.sleep_forever()
        self.body += message.get("body", b"")
        self.done = message["type"] == "http.response.body" and not message.get("more_body")


async def stream(one, reader, readers=None, cut_off=None):
    readers = readers or event_stream.Readers(lambda: False)
    with anyio.fail_after(30):
        await event_stream.EventStream(one, 0, readers, cut_off)(
            {"type": "http", "client": ("a", 1)}, reader.receive, reader.send
        )
    assert readers.number == 0


@pytest.mark.anyio
async def test_a_stream_ends_with_the_last_message(anyio_backend):
    one, reader = MessageLog(), Reader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream, one, reader)
        one.post("note", {"a": 1})
        while b"note" not in reader.body:
            await anyio.sleep(0.01)
        assert not reader.done
        one.post("state", {"state": "finished"}, last=True)
    assert reader.done
    assert reader.body.endswith(b'data: {"state":"finished"}\n\n')


@pytest.mark.anyio
async def test_a_stream_ends_when_its_reader_leaves_or_its_server_ends(anyio_backend):
    for leave in ("reader", "server"):
        reader, board = Reader(), Board()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream, MessageLog(), reader, event_stream.Readers(lambda board=board: board.closed))
            while not reader.parts:
                await anyio.sleep(0.01)
            if leave == "reader":
                reader.left.set()
            else:
                board.closed = True
        assert reader.done is (leave == "server")


@pytest.mark.anyio
async def test_a_stuck_stream_is_cut_off_by_the_address_of_its_reader(anyio_backend, change):
    change(event_stream.PATIENCE, 0.05)
    one, cut = MessageLog(), []
    one.post("note", {})
    await stream(one, Reader(stuck_after=1), cut_off=cut.append)
    assert cut == [("a", 1)]


@pytest.mark.anyio
async def test_a_quiet_stream_gives_a_sign_of_life(anyio_backend, change):
    change(event_stream.QUIET, 0.1)
    one, reader = MessageLog(), Reader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream, one, reader)
        while b": still here\n\n" not in reader.body:
            await anyio.sleep(0.01)
        reader.left.set()
    assert iterations([reader.body]) == []
