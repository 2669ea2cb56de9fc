"""Errors and warnings of hooks that need validations, in a training without them."""

from __future__ import annotations

from eventloop import ConfigurationError, get_logger
from eventloop.events import AfterRun, AfterTrain, BeforeTrain

log = get_logger()


def check_validated(event: BeforeTrain, what: str) -> None:
    """Raise ConfigurationError if the training that begins has no validation; ``what`` is the hook, with its option."""
    if event.run.validates is False:
        raise ConfigurationError(
            f"{what} goes by a metric of validations, but this loop has no data for them: give TrainLoop val_data, or leave "
            "the hook (or its option) out"
        )


def warn_unvalidated(event: AfterTrain | AfterRun, what: str) -> None:
    """Warn if a training that has come to its end had no validation: in a loop of the user's own that is not known before."""
    done = event.progress
    if event.run.validates is None and (done.epoch == done.max_epochs or done.iter == done.max_iters):
        log.warning(f"{what} goes by a metric of validations, but this training had none: call run.validate(...) in your loop")
