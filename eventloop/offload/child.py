"""What runs in a worker process: import the handler, then call it with one parcel after the other."""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from eventloop.offload.parcel import unpack
from eventloop.offload.segment import Segment
from eventloop.offload.target import Target

# Meant for the program, whose children get them too (Ctrl-C, a scheduler's SIGTERM): it decides when its workers end.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class Reply(msgspec.Struct, array_like=True):
    """How a call ended. ``error`` is the exception, pickled, where that can be done and undone."""

    ok: bool = True
    error: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""


def serve(pipe: Connection, segment: Segment, target: Target, batched: bool) -> None:
    """Call the handler until the other side says so or is gone.

    Args:
        pipe: brings tickets, takes replies; an empty message ends the worker.
        segment: where the parcels are.
        target: the handler.
        batched: whether it gets the list.
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
        _send(pipe, _reply(error))
        return
    _send(pipe, Reply())
    while ticket := _receive(pipe):
        _send(pipe, _call(handler, ticket, segment, batched=batched))


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


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):  # the other side is gone
        return b""


def _send(pipe: Connection, reply: Reply) -> None:
    try:
        pipe.send_bytes(msgspec.msgpack.encode(reply))
    except OSError:  # the other side is gone, as the next _receive finds
        return


def _nothing(number: int, frame: object) -> None:
    """Take a signal that is meant for the program, not for its workers."""
