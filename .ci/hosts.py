"""Run the tests of the bridges with the lowest and the newest version of each host, of torch and of Python.

    python .ci/hosts.py                      # all environments; writes the table in docs/bridges.md
    python .ci/hosts.py lowest-hosts         # some of them; writes their rows
    python .ci/hosts.py --keep ENVIRONMENTS  # environments are kept there, and used again

Each environment is made by pip, downloads included. The lowest versions are those of pyproject.toml. A Python that is not on
the path is left out. Exits with 1 if a test fails.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "bridges.md"
BEGIN, END = "<!-- written by .ci/hosts.py -->\n", "<!-- end -->\n"
HOSTS = {
    "lightning": "Lightning",
    "transformers": "Transformers",
    "accelerate": "Accelerate",
    "pytorch-ignite": "Ignite",
    "mmengine": "MMEngine",
}
BRIDGES = ("-m", "", "tests/bridges", "tests/compat", "tests/training/test_wrappers.py", "tests/examples/test_bridges.py")
EVERYTHING = ("tests",)  # without the long ones
TORCH = "torch==2.13.0"
"""Of the README's commands; the torch of the environments in which something else varies."""


@dataclass(frozen=True)
class Environment:
    """What is installed, and the tests to run, as arguments of pytest."""

    name: str
    torch: str = TORCH
    lowest: bool = False
    """Of the hosts: their lowest versions, or the newest that pip finds."""
    python: str = sys.executable
    tests: tuple[str, ...] = BRIDGES

    def requirements(self) -> list[str]:
        """Return the arguments of ``pip install``."""
        extras = "dev,mlflow,wandb,accelerate,ignite,lightning,transformers,mmengine"
        return [self.torch, f"-e{ROOT}[{extras}]", *([f"{host}=={lowest(host)}" for host in HOSTS] if self.lowest else ())]


def lowest(package: str) -> str:
    """Return the lower bound of a package in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'"{package}>=([0-9.]+)', json.dumps(tomllib.loads(text)["project"]))
    if found is None:
        raise LookupError(f"{package} has no lower bound in pyproject.toml")
    return found[1]


def environments() -> list[Environment]:
    """Return all environments."""
    return [
        Environment("lowest-hosts", lowest=True),
        Environment("newest-hosts"),
        Environment("lowest-torch", torch=f"torch=={lowest('torch')}.*", tests=EVERYTHING),
        Environment("newest-torch", torch="torch", tests=EVERYTHING),
        *(Environment(f"python-3.{minor}", python=f"python3.{minor}", tests=EVERYTHING) for minor in (12, 13, 14)),
    ]


def made(environment: Environment, folder: Path) -> Path:
    """Make an environment, if it is not there; return its Python."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([environment.python, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *environment.requirements()], check=True)
        # MMEngine imports cv2, whose usual package needs libraries of a desktop.
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "opencv-python"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "opencv-python-headless"], check=True)
        (folder / "complete").touch()
    return python


def versions(python: Path) -> list[str]:
    """Return the versions of Python, torch and the hosts in an environment."""
    code = "import sys, importlib.metadata as m; print(sys.version.split()[0], *map(m.version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, "torch", *HOSTS], check=True, capture_output=True, text=True).stdout
    return [one.partition("+")[0] for one in found.split()]


def counts(python: Path, tests: tuple[str, ...], report: Path) -> tuple[int, int, int]:
    """Run tests; return how many passed, failed and were skipped."""
    subprocess.run([python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *tests], cwd=ROOT, check=False)
    suite = next(ET.parse(report).iter("testsuite"))  # noqa: S314 - pytest wrote it
    every, skipped, failed = (int(suite.get(name, 0)) for name in ("tests", "skipped", "failures"))
    failed += int(suite.get("errors", 0))
    return every - skipped - failed, failed, skipped


def write(cells: list[str]) -> None:
    """Put a row into the table, in the place of the earlier one of its environment."""
    row = f"| {' | '.join(cells)} |"
    print(row, flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]} | {cells[0]: row}
    head = ["environment", "run on", "Python", "torch", *HOSTS.values(), "tests", "passed", "failed", "skipped"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += (rows[one.name] for one in environments() if one.name in rows)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {one.name: one for one in environments()}
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--keep", type=Path, help="folder of the environments (default: a temporary one)")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - every.keys()):
        parser.error(f"{unknown[0]} is not the name of an environment; the names are {', '.join(every)}")
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        for one in [every[name] for name in options.names] or every.values():
            if shutil.which(one.python) is None:
                print(f"{one.name} is left out: {one.python} is not on the path")
                continue
            python = made(one, folder / one.name)
            passed, failed, skipped = counts(python, one.tests, folder / f"{one.name}.xml")
            tests = "all but the long ones" if one.tests == EVERYTHING else "bridges, guests"
            write([one.name, f"{date.today():%Y-%m-%d}", *versions(python), tests, f"{passed:,}", str(failed), str(skipped)])
            failures += failed
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
