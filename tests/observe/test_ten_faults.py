"""Ten trainings with a hidden fault each: the report alone tells which, as the worst that it has found."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainbus.cli import main

from ..scripts import run_on_ranks, run_script

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
SCRIPT = "import sys; from tests.observe.faulty import main; main(*sys.argv[1:])"
FINDINGS = r"% of the time|took|takes|dropped|Memory grew|NaN|The other ranks wait"
"""What the sentences have that find something; the others tell how the run went."""
NOTHING = "No hook, lane, checkpoint or wait for data took much of the time."

FAULTS = {
    "rank": r"The other ranks wait [4-7]\d% of the time for rank 1 \(.*\): forward takes 3\d.* ms an iteration there, .*",
    "hook": r"Plots takes [23]\d% of the time: [4-6]\.\d+ ms an iteration\.",
    "leak": r"Memory grew by .*; Outputs keeps 20\d kB more each iteration\.",
    "list": r"Memory grew by .*; step keeps 20\d kB more each iteration\.",
    "lane": r"Training waits \d\d% of the time for the full lane of Uploader: its handler takes 3\d.* ms an event\.",
    "events": r"The lane of Telemetry dropped \d+ of 400 events: its handler takes 3\d.* ms an event\.",
    "data": r"[45678]\d% of the time is waiting for data: 1[5-9].* ms an iteration\.",
    "disk": r"Checkpoints hold training up for [4-9]\d% .* because the one before was still being written\)\.",
    "rate": r"train/loss is NaN or infinite in \d+ of 40 values, first at iteration \d+\.",
    "validation": r"Validation takes [3-5]\d% of the time \(.* s\)\.",
}
"""The finding that names each of them."""
ALONE = ("none", "rate")
"""These run one after the other: beside others an iteration waits a little for a core, which is a finding."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """``trained(fault)``: the folder of such a training. Most run three at a time, as they mostly sleep; the longest begins."""
    places = {fault: tmp_path_factory.mktemp(fault) for fault in ("none", *FAULTS)}

    def train(fault: str) -> None:
        place = places[fault]
        options: dict[str, Any] = {"arguments": (fault, place / "run"), "environment": {"PYTHONPATH": ROOT}, "cwd": ROOT}
        ended = run_on_ranks(SCRIPT, place, **options) if fault == "rank" else [run_script(SCRIPT, place, **options)]
        assert [one.returncode for one in ended] == [0] * len(ended), ended[0].stderr

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, [fault for fault in places if fault not in ALONE]))
    for fault in ALONE:
        train(fault)
    return lambda fault: places[fault] / "run"


@pytest.fixture
def told(trained, capsys):
    """``told(fault)``: what the report of such a training finds, the worst first."""

    def read(fault: str) -> list[str]:
        assert main(["report", str(trained(fault)), "--json"]) == 0
        [run] = json.loads(capsys.readouterr().out)["runs"]
        return [one for one in run["verdict"] if re.search(FINDINGS, one) and "writing one took" not in one]

    return read


def test_without_a_fault_nothing_is_found(told):
    assert told("none") == [NOTHING]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_the_first_finding(told, fault):
    found = [one for one in told(fault) if one != NOTHING]
    assert re.fullmatch(FAULTS[fault], found[0]), found
