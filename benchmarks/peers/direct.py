"""What no dispatcher can beat: the calls themselves, written out or in a loop."""

from collections.abc import Mapping

from benchmarks.peers import Statement, no_op_handlers

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
