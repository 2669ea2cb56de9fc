"""The scripts of other libraries: with two lines for the bus they train the same weights as without, and leave more behind."""

import difflib
from pathlib import Path

import pytest
import torch

from ..scripts import run_script

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
pytest.importorskip("sklearn")

RUN = """
import os, runpy, sys, torch
scripts, sys.argv[1:] = sys.argv[1:], []
for script in scripts:
    folder = "plain" if "/plain/" in script else "bus"
    os.mkdir(folder)
    os.chdir(folder)
    torch.save(runpy.run_path(script, run_name="__main__")["model"].state_dict(), "model.pt")
    os.chdir("..")
"""
HOSTS = [
    ("lightning", "lightning_digits", "runs/lightning"),
    ("transformers", "hf_tiny", "runs/hf"),
    ("accelerate", "accelerate_digits", "runs/accelerate"),
    ("ignite", "ignite_digits", "runs/ignite"),
]


@pytest.mark.long
@pytest.mark.timeout(110)
@pytest.mark.parametrize(("library", "name", "work_dir"), HOSTS)
def test_with_the_bus_the_script_trains_the_same_weights_and_leaves_more(tmp_path, library, name, work_dir):
    """One process runs both: most of the time of each is that of its imports."""
    pytest.importorskip(library)
    scripts = [EXAMPLES / "plain" / f"{name}.py", EXAMPLES / f"{name}.py"]
    done = run_script(RUN, tmp_path, arguments=scripts, environment={"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, weights = (torch.load(tmp_path / folder / "model.pt") for folder in ("plain", "bus"))
    assert weights.keys() == alone.keys()
    assert all(torch.equal(weights[key], alone[key]) for key in alone)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{work_dir}: ")
    assert "scalars.jsonl" in last
    assert "loss" in (tmp_path / "bus" / work_dir / "scalars.jsonl").read_text()
    assert len(last) <= 80


@pytest.mark.parametrize("name", [name for _, name, _ in HOSTS])
def test_the_bus_takes_three_lines_more(name):
    plain, bus = ((EXAMPLES / part).read_text().splitlines() for part in (f"plain/{name}.py", f"{name}.py"))
    # Without the indentation: a `with` moves the loop of Accelerate's script.
    changes = [one for one in difflib.ndiff([line.strip() for line in plain], [line.strip() for line in bus]) if one[2:]]
    added, removed = (sum(one.startswith(sign) for one in changes) for sign in ("+ ", "- "))
    replaced = 3 if name == "accelerate_digits" else 0  # its three `for` statements
    assert (removed, added - removed) == (replaced, 4 if replaced else 3)
