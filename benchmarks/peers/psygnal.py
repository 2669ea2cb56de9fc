"""psygnal: typed signals as class attributes."""

from collections.abc import Mapping

from psygnal import Signal

from benchmarks.peers import Statement, no_op_handlers


class OneEvent:
    after_train_iter = Signal(object)


class Fields:
    after_train_iter = Signal(object, object, int, object, object)


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    training = OneEvent() if handlers else Fields()
    functions = no_op_handlers(handlers)
    for handler in functions:
        training.after_train_iter.connect(handler)
    arguments = "event" if handlers else "run, progress, 0, None, None"
    code = f"training.after_train_iter.emit({arguments})"
    return Statement(code, {**names, "training": training, "alive": functions})
