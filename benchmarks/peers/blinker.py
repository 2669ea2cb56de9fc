"""blinker: named signals; the sender is positional, the rest are keywords."""

from collections.abc import Callable, Mapping

from blinker import Signal

from benchmarks.peers import Statement


def dispatch(names: Mapping[str, object], handlers: int) -> Statement:
    signal = Signal("after_train_iter")
    receivers = [no_op_receiver() for _ in range(handlers)]
    for receiver in receivers:
        signal.connect(receiver)
    arguments = "event=event" if handlers else "progress=progress, batch_idx=0, batch=None, outputs=None"
    code = f"after_train_iter.send(run, {arguments})"
    # The signal holds its receivers weakly: they stay alive in the statement's names.
    return Statement(code, {**names, "after_train_iter": signal, "alive": receivers})


def no_op_receiver() -> Callable[..., None]:
    def receiver(sender: object, event: object) -> None:
        pass

    return receiver
