"""For plugins of pytest: leave out the tests that ask for what is not there, and say so in their reports."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def leaving_out(asks: Callable[[BaseException], bool], reason: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a plugin's ``pytest_runtest_makereport`` and ``pytest_make_collect_report``.

    A test that fails is reported as skipped if ``asks`` returns True for its error, or for one that it was raised from.
    """

    def skip(report: Any, call: Any) -> Any:
        error = None if call is None or call.excinfo is None else call.excinfo.value
        if report.failed and any(asks(one) for one in _origins(error)):
            report.outcome, report.longrepr = "skipped", (__file__, 0, f"{reason}: {error}")
        return report

    @pytest.hookimpl(wrapper=True)
    def of_a_test(call):
        return skip((yield), call)

    @pytest.hookimpl(wrapper=True)
    def of_a_module(collector):
        report = yield
        return skip(report, getattr(report, "call", None))

    return of_a_test, of_a_module


def _origins(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            yield from itertools.chain.from_iterable(map(_origins, error.exceptions))
            return
        yield error
        error = error.__cause__ or error.__context__
