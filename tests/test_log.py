import sys

import pytest
import structlog
from structlog.testing import capture_logs

from trainbus.eventloop import get_logger
from trainbus.eventloop.log import collected


@pytest.fixture(autouse=True)
def not_configured(monkeypatch):
    monkeypatch.setattr("structlog.is_configured", lambda: False)


class Gone:
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_lines_go_to_stderr_by_default(capsys):
    get_logger().warning("slow disk", seconds=3)
    assert "slow disk" in capsys.readouterr().err


def test_if_stderr_fails_lines_go_to_the_original_stderr_and_without_any_nothing_is_raised(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(sys, "__stderr__", type("Own", (Gone,), {"write": lambda self, text: lines.append(text)})())
    get_logger().error("a handler failed")
    assert "a handler failed" in "".join(lines)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "__stderr__", Gone())
    assert get_logger().error("a handler failed") is None


def test_a_line_is_a_single_write(monkeypatch):
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stderr", type("Pipe", (Gone,), {"write": lambda self, text: pieces.append(text)})())
    get_logger().warning("slow disk")
    get_logger().error("a handler failed")
    assert [piece.count("\n") for piece in pieces] == [1, 1]
    assert all(piece.endswith("\n") for piece in pieces)


def test_control_characters_in_values_and_tracebacks_do_not_reach_the_terminal(capsys):
    error = ValueError("a\x1b[31m\r")
    get_logger().error("no \x1b[2J", path="b\x1b[31m", exc_info=error)
    text = capsys.readouterr().err
    assert "\x1b" not in text
    assert "\r" not in text
    assert "ValueError: a\\x1b[31m" in text


def test_the_id_of_a_warning_is_not_part_of_the_line_on_a_terminal_nor_of_what_is_collected(capsys):
    log = get_logger()
    log.warning("slow disk", id="slow-disk", seconds=3)
    line = capsys.readouterr().err
    assert "slow disk" in line
    assert "slow-disk" not in line
    with collected() as lines:
        log.warning("slow disk", id="slow-disk", seconds=3)
    assert lines == ["slow disk (seconds=3)"]
    with capture_logs() as entries:
        structlog.get_logger().warning("slow disk", id="slow-disk")
    assert [entry["id"] for entry in entries] == ["slow-disk"]
