"""Run tests of the engine and of the hooks where nothing else of trainbus is installed: ``python -m tests.inner_rings FOLDER``.

Give options of pytest behind the folder, which is made. A test that asks for a part that is not there is left out, and counted.
"""

import os
import subprocess
import sys
from pathlib import Path

from trainbus.eventloop.errors import ConfigurationError

from .leaving_out import leaving_out

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


def looks_outward(error: BaseException) -> bool:
    name = (getattr(error, "name", None) or "").split(".")
    if isinstance(error, ImportError) and name[0] == "trainbus":
        return len(name) == 1 or name[1] not in INNER
    return isinstance(error, ConfigurationError) and "is not installed here" in str(error)


pytest_runtest_makereport, pytest_make_collect_report = leaving_out(looks_outward, "looks outward")


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), *(sys.argv[2:] or [f"tests/{name}" for name in TESTS]))
    print(found.stdout, found.stderr)  # noqa: T201
    sys.exit(found.returncode)
