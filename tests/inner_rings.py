"""Run tests of the engine and of the hooks where nothing else of trainbus is installed: ``python -m tests.inner_rings FOLDER``.

Give options of pytest behind the folder, which is made. A test that asks for a part that is not there is left out, and counted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainbus.eventloop.errors import ConfigurationError

ROOT = Path(__file__).parent.parent
INNER = ("eventloop", "hooks")
TESTS = ("events", "bus", "offload", "measure", "checkpoint", "training", "hooks")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    package = folder / "trainbus"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in INNER:
        (package / name).symlink_to(ROOT / name)
    for name in ("pyproject.toml", "tests", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.inner_rings", *options]
    return subprocess.run(  # noqa: S603
        pytest_, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )


def looks_outward(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("trainbus."):
            return not (error.name or "").startswith(tuple(f"trainbus.{name}" for name in INNER))
        if isinstance(error, ImportError) and error.name == "trainbus":
            return True
        if isinstance(error, ConfigurationError) and "is not installed here" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    report = yield
    if call.excinfo is not None and looks_outward(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (__file__, 0, f"looks outward: {call.excinfo.value}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None and looks_outward(call.excinfo.value.__cause__):
        report.outcome, report.longrepr = "skipped", (__file__, 0, "looks outward")
    return report


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), *(sys.argv[2:] or [f"tests/{name}" for name in TESTS]))
    print(found.stdout, found.stderr)  # noqa: T201
    sys.exit(found.returncode)
