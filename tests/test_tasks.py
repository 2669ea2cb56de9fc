"""The tasks of noxfile.py: the workflows call those that are there, and what they name exists."""

import ast
import tomllib
from pathlib import Path

import yaml

from trainbus import eventloop

ROOT = Path(eventloop.__file__).resolve().parent.parent
TREE = ast.parse((ROOT / "noxfile.py").read_text())
GIVEN = [node for node in TREE.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
NAMES = {node.targets[0].id: node.value for node in GIVEN}
HOSTS, ENGINES, PYTHONS = (ast.literal_eval(NAMES[name]) for name in ("HOSTS", "ENGINES", "PYTHONS"))
TASKS = {node.name for node in TREE.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
TASKS -= {"host", "engine", "tests", "changelog"}
TASKS |= {f"host({name})" for name in HOSTS} | {f"engine({name})" for name in ENGINES} | {f"tests-{one}" for one in PYTHONS}


def test_tasks_name_extras_and_tests_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, paths in (HOSTS | ENGINES).items():
        assert extra in extras
        assert all((ROOT / path).exists() for path in paths), paths


def test_the_workflows_call_all_tasks():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    called = {task for job in jobs.values() for task in job["strategy"]["matrix"].get("task", ())}
    called |= {f"tests-{one}" for one in jobs["tests"]["strategy"]["matrix"]["python"]}
    assert called == TASKS


def test_each_change_that_is_not_released_has_a_kind_and_at_most_three_lines():
    kinds = {one["directory"] for one in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]}
    for change in (ROOT / "changes").glob("*"):
        if change.name != "README.md":
            assert change.name.split(".")[1:] == [change.name.split(".")[1], "md"], change.name
            assert change.name.split(".")[1] in kinds, change.name
            assert 0 < len(change.read_text().splitlines()) <= 3, change.name
