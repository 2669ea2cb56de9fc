"""The signature of ``bus.on``: a handler with the wrong annotation fails the type checker, a right one passes."""

import re
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.timeout(300)  # the first run of mypy on a machine reads all of torch
def test_wrong_handlers_are_type_errors_and_right_ones_are_not():
    files = [HERE / "right.py", HERE / "wrong.py"]
    out, err, _ = api.run(["--config-file", str(ROOT / "pyproject.toml"), *map(str, files)])
    assert not err
    reported = {
        (Path(match["file"]).name, int(match["line"]))
        for match in re.finditer(r"^(?P<file>[^:]+):(?P<line>\d+): error:", out, re.MULTILINE)
    }
    expected = {
        (file.name, number)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if line.endswith("# error")
    }
    assert reported == expected, out
