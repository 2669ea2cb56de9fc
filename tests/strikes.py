"""Ctrl-C at each line of what a test names."""

import sys
from collections.abc import Callable
from types import FrameType


def strikes_at(at: int, call: Callable[[], object], counts: Callable[[FrameType], bool]) -> bool:
    """Raise KeyboardInterrupt at the n-th line, from 0, of the frames that count; False if a call has not so many."""
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if event == "line":
            lines += 1
            if lines > at:
                raise KeyboardInterrupt  # which ends the tracing
        return count

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: count if counts(frame) else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
