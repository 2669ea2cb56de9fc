"""The program of a worker process: import the handler, then call it with one parcel after the other."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from eventloop.offload.parcel import Segment, unpack
from eventloop.offload.target import Target

# Signals to the program, which its children get too (Ctrl-C, a scheduler's SIGTERM): the program decides when workers end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Reply(msgspec.Struct, array_like=True):
    """How a call ended. ``error`` is the exception, pickled, where that can be done and undone."""

    ok: bool = True
    error: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""


def serve(pipe: Connection, segment: Segment, target: Target, batched: bool) -> None:
    """Call the handler for each parcel until the other side ends that or is gone.

    Args:
        pipe: brings tickets, takes replies; an empty message ends the worker.
        segment: holds the parcels.
        target: finds the handler.
        batched: whether the handler gets the list of a batch.
    """
    for number in SIGNALS:
        # A handler that does nothing, and not SIG_IGN, which programs started by the user's handler would inherit.
        signal.signal(number, _nothing)
        signal.siginterrupt(number, False)  # a read in the handler's C code goes on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the parent until now
    torch.set_num_threads(1)  # the training needs the others
    try:
        handler = target.load()
    except Exception as error:  # noqa: BLE001 - told to the other side
        send(pipe, msgspec.msgpack.encode(_reply(error)))
        return
    send(pipe, msgspec.msgpack.encode(Reply()))
    while ticket := receive(pipe):
        send(pipe, msgspec.msgpack.encode(_call(handler, ticket, segment, batched=batched)))


def _call(handler: Callable[[Any], object], ticket: bytes, segment: Segment, *, batched: bool) -> Reply:
    try:
        items = unpack(ticket, segment)
        handler(items if batched else items[0])
    except Exception as error:  # noqa: BLE001 - told to the other side
        return _reply(error)
    return Reply()


def _reply(error: Exception) -> Reply:
    text = "".join(traceback.format_exception(error))
    return Reply(False, _pickled(error), f"{type(error).__module__}.{type(error).__qualname__}", str(error), text)


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        again = pickle.loads(data)  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - an exception may be made of anything; its name and text are told anyway
        return b""
    # Some come back as another: those whose __init__ makes the message, from arguments that args does not hold.
    return data if type(again) is type(error) and str(again) == str(error) else b""


def receive(pipe: Connection) -> bytes:
    """Return the next message; an empty one if the other side is gone."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return b""


def send(pipe: Connection, message: bytes) -> None:
    """Send a message; ignored if the other side is gone, as the next :func:`receive` finds."""
    with suppress(OSError):
        pipe.send_bytes(message)


def _nothing(number: int, frame: object) -> None:
    """Ignore a signal to the program, not to its workers."""
