"""pyee: string-named events on an emitter."""

from collections.abc import Mapping

from pyee import EventEmitter

from benchmarks.peers import Statement, no_op_handlers


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    emitter = EventEmitter()
    for handler in no_op_handlers(handlers):
        emitter.on("after_train_iter", handler)
    arguments = "event" if handlers else "run, progress, 0, None, None"
    return Statement(f'emitter.emit("after_train_iter", {arguments})', {**names, "emitter": emitter})
