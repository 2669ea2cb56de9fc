"""Run the tests of the core on another system: ``python -m tests.systems windows`` (or ``macos``) simulates it on Linux.

``python -m tests.systems here`` runs them on this system, which need not be Linux. Options of pytest and tests may follow. A
test that itself asks for what the system lacks, such as a fork, is left out, and counted.
"""

import os
import subprocess
import sys
from pathlib import Path

CORE = ("events", "bus", "offload", "measure", "checkpoint", "training", "hooks", "config")
HERE = Path(__file__).parent

if __name__ == "__main__":
    system, *options = sys.argv[1:]
    simulated = {"TRAINBUS_TESTS_SYSTEM": system, "PYTHONPATH": str(HERE / "start")}
    environment = os.environ | ({} if system == "here" else simulated)
    if not any("tests/" in one for one in options):
        options += [f"tests/{name}" for name in CORE]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.systems.left_out", *options]
    sys.exit(subprocess.run(command, cwd=HERE.parent.parent, env=environment, check=False).returncode)  # noqa: S603
