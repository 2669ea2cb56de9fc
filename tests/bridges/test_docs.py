"""docs/bridges.md says what is so: the table of mount points, the lines that are added, the versions."""

import difflib
import re
from importlib import import_module
from pathlib import Path

import pytest

from trainbus.eventloop import Bus
from trainbus.eventloop.events.event import registry
from trainbus.testing.host_job import heard

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "bridges.md").read_text()
HOSTS = {
    "Lightning": ("lightning", "LightningBridge", "lightning_digits"),
    "Transformers": ("transformers", "TransformersBridge", "hf_tiny"),
    "Accelerate": ("accelerate", "", "accelerate_digits"),
    "Ignite": ("ignite", "IgniteBridge", "ignite_digits"),
}
BASES = {"before_epoch", "after_epoch", "before_iter", "after_iter", "run_event", "module_event"}  # of several mount points


def table():
    """The cells of the table of mount points: {mount point: {host: text}}."""
    lines = PAGE[PAGE.index("| mount point |") :].splitlines()
    hosts = [cell.split()[0] for cell in lines[0].strip("| ").split(" | ")[1:]]
    found = {}
    for line in lines[2:]:
        first, *cells = line.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", first):
            assert name not in found, name
            found[name] = dict(zip(hosts, cells, strict=True))
    return found


def not_given(host):
    return {name for name, cells in table().items() if cells[host].startswith("no:")}


def test_the_bridge_of_the_page_has_at_most_150_lines():
    assert len((ROOT / "examples" / "toy_bridge.py").read_text().splitlines()) <= 150


def test_the_table_has_every_mount_point():
    catalogue = {name for name, kind in registry.items() if kind.__module__.startswith("trainbus.eventloop.")}
    assert set(table()) == catalogue - BASES


@pytest.mark.parametrize("host", [host for host, (_, bridge, _) in HOSTS.items() if bridge])
def test_the_table_agrees_with_missing(host):
    library, bridge, _ = HOSTS[host]
    pytest.importorskip(library)
    kind = getattr(import_module(f"trainbus.bridges.{library}.host"), bridge)
    assert not_given(host) == set(kind.missing)


def test_the_table_agrees_with_a_loop_with_accelerate(tmp_path):
    names = heard(bus := Bus())
    job = import_module("tests.bridges.conformance.accelerate").Job(tmp_path, bus, epochs=1, validate=True, every=4)
    job.fit()
    with job.run(None) as run:
        for batch in run.test(job.val_data):
            run.report(loss=job.net.loss(batch))
    assert not set(names) & not_given("Accelerate")
    assert set(names) >= {name for name in table() if "iter" in name or "epoch" in name or name in ("before_run", "after_run")}
    assert "before_save_checkpoint" in names


@pytest.mark.parametrize("host", HOSTS)
def test_the_lines_that_are_added_are_those_of_the_example(host):
    name = HOSTS[host][2]
    section = PAGE[PAGE.index(f"\n## {host}\n") :]
    shown = [line for line in re.search(r"```diff\n(.*?)```", section, re.DOTALL)[1].splitlines() if line[0] in "+-"]
    plain, bus = ((ROOT / "examples" / part).read_text().splitlines() for part in (f"plain/{name}.py", f"{name}.py"))
    compared = difflib.ndiff([line.strip() for line in plain], [line.strip() for line in bus])
    changed = [line[0] + line[2:] for line in compared if line[0] in "+-" and line[2:]]
    assert [line[0] + line[1:].strip() for line in shown] == changed


@pytest.mark.parametrize("host", HOSTS)
def test_the_lowest_tested_version_is_the_one_that_is_required(host):
    library = HOSTS[host][0]
    lowest = re.search(rf"^\| {host} \|[^|]*\| ([\d.]+) \|", PAGE, re.MULTILINE)[1]
    project = (ROOT / "pyproject.toml").read_text()
    name = {"ignite": "pytorch-ignite"}.get(library, library)
    bounds = set(re.findall(rf'"{name}>=([\d.]+)"', project))
    assert bounds == {lowest}
