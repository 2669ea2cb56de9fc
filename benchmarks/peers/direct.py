"""The lower bound for every dispatcher: the calls themselves, written out or in a loop."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.peers import Logged, Statement, no_op_handlers

CONSTRUCT = "AfterTrainIter(run=run, progress=progress, batch_idx=0, batch=None, outputs=None)"


def calls(names: Mapping[str, object], handlers: int) -> Statement:
    """``h0(event); …; h9(event)``, with the handlers as globals of the script; with no handler, the event alone."""
    if not handlers:
        return Statement(CONSTRUCT, names)
    functions = {f"h{i}": handler for i, handler in enumerate(no_op_handlers(handlers))}
    return Statement("\n".join(f"{name}(event)" for name in functions), {**names, **functions})


def for_loop(names: Mapping[str, object], handlers: int) -> Statement:
    """``for handler in handlers: handler(event)``."""
    event = "event" if handlers else CONSTRUCT
    code = f"payload = {event}\nfor handler in handlers:\n    handler(payload)"
    return Statement(code, {**names, "handlers": no_op_handlers(handlers)})


@contextmanager
def six_floats(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    """A function of six arguments that does nothing."""

    def log(a: object, b: object, c: object, d: object, e: object, f: object) -> None:
        pass

    yield Logged(Statement(f"log({', '.join(map(repr, scalars.values()))})", {"log": log}))


@contextmanager
def six_tensors(work_dir: Path, scalars: Mapping[str, object]) -> Iterator[Logged]:
    """Copy all values once, on their device."""
    row = torch.empty(len(scalars)).unbind()
    names = {"copy": torch._foreach_copy_, "row": row, "tensors": tuple(scalars.values())}
    yield Logged(Statement("copy(row, tensors)", names))
