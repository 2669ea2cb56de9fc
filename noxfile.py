"""What guards trainbus, one task at a time: ``nox -s tests-3.11``, ``nox -s "host(ignite)"``; ``nox -l`` lists all.

The workflows in .github/ run these tasks, and .ci/run all of them on one machine.
"""

import os
from pathlib import Path

import nox

TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""Of the README's commands; a workflow gives others."""
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
HOSTS = {
    "accelerate": ["tests/bridges/test_accelerate.py", "tests/training/test_wrappers.py"],
    "ignite": ["tests/bridges"],
    "lightning": ["tests/bridges"],
    "mmengine": ["tests/compat"],
    "transformers": ["tests/bridges", "tests/compat"],
}
"""Extras of pyproject.toml, and the tests that need them."""
ENGINES = {"nvrx": ["tests/hooks/test_heartbeat.py"], "ray": ["tests/bridges/ray"], "torchft": ["tests/bridges/torchft"]}

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "uv|virtualenv"


def install(session: nox.Session, *extras: str) -> None:
    """Install torch first: with it at hand, the rest resolves in seconds."""
    session.install(TORCH)
    session.install("-e", f".[{','.join(('dev', *extras))}]")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests but the long ones."""
    install(session)
    session.run("pytest", *session.posargs)


@nox.session
def systems(session: nox.Session) -> None:
    """The tests of the core on this system, which need not be Linux."""
    install(session)
    session.run("python", "-m", "tests.systems", "here", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """The long tests."""
    install(session)
    session.run("pytest", "-m", "long", *session.posargs)


@nox.session
def loops(session: nox.Session) -> None:
    """Training programs that a grammar writes, killed and resumed."""
    install(session)
    session.run("pytest", "-m", "loops", "tests/loops", *(session.posargs or ["--bodies", "1000"]))


@nox.session
def zoo(session: nox.Session) -> None:
    """What other libraries have, against torch.save."""
    install(session)
    session.install("pytorch_optimizer", "schedulefree", "prodigyopt", "torchdata", "peft")
    session.run("pytest", "-m", "zoo", "tests/zoo", *session.posargs)


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in HOSTS])
def host(session: nox.Session, name: str) -> None:
    """The bus in another library's trainer."""
    install(session, name)
    if name == "mmengine":  # its OpenCV needs libraries of a desktop
        session.run("pip", "uninstall", "-y", "opencv-python", external=True, success_codes=[0, 1])
        session.install("opencv-python-headless")
    session.run("pytest", "-m", "", *HOSTS[name], *session.posargs)


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in ENGINES])
def engine(session: nox.Session, name: str) -> None:
    """The bus in an engine for many machines."""
    install(session, name)
    session.run("pytest", "-m", "", *ENGINES[name], *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Lint, format, and the arrows between the parts."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Types of the package, the examples, and the tests of types."""
    install(session)
    session.run("mypy")
    session.run("mypy", *sorted(str(file) for file in Path("examples").glob("*.py")))


@nox.session
def changelog(session: nox.Session) -> None:
    """What the changes that are not released yet will become in the CHANGELOG."""
    session.install("towncrier")
    session.run("towncrier", "build", "--draft", "--version", "next")


@nox.session
def docs(session: nox.Session) -> None:
    """The site: pages, links, reference, and each block of code."""
    install(session, "docs")
    session.run("pytest", "-m", "", "tests/docs", *session.posargs, env={"TRAINBUS_DOCS": "all"})
