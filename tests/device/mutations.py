"""Leave out, in turn, what orders the training, the copies and the readers of a device, and show that a test fails.

``python -m tests.device.mutations`` tries all in a copy of the checkout; ``python -m tests.device.mutations 3 7`` those two.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import blockbuster  # noqa: F401 - here and below: what a test run imports, once for all
import fsspec  # noqa: F401
import msgspec  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import structlog  # noqa: F401
import torch._dynamo  # noqa: F401

ROOT = Path(__file__).parents[2]
STAGING, VALUES = "tests/device/test_staging.py", "tests/device/test_values.py"
OVERLAP, LOOP = "tests/checkpoint/test_overlap.py", "tests/device/test_training.py"


class Mutation(NamedTuple):
    """A text of a module that occurs there once, what stands there instead, and the tests of which one must fail."""

    without: str
    module: str
    text: str
    replacement: str
    tests: str


DOOR, STAGE, LATE = "eventloop/device.py", "eventloop/checkpoint/staging.py", "eventloop/checkpoint/overlap.py"
SCALARS, SNAPSHOT = "eventloop/offload/scalars.py", "eventloop/offload/snapshot.py"
MUTATIONS = [
    Mutation(
        "the current stream, in events", DOOR, "module.current_stream(device))", "module.default_stream(device))", STAGING
    ),
    Mutation(
        "the stream of copies",
        DOOR,
        "get_device_module(device).stream(stream)",
        "get_device_module(device).stream(None)",
        STAGING,
    ),
    Mutation(
        "the current stream, of scalars",
        DOOR,
        "partial(module.current_stream, device)",
        "partial(module.default_stream, device)",
        VALUES,
    ),
    Mutation("copies that are queued", DOOR, ".copy_(tensor.detach(), non_blocking=True)", ".copy_(tensor.detach())", VALUES),
    Mutation("pinned memory", STAGE, "pinned_bytes(size) if layout.pinned else allocate", "allocate", STAGING),
    Mutation(
        "copies that are queued, when staging", STAGE, "non_blocking=is_asynchronous(device))", "non_blocking=False)", STAGING
    ),
    Mutation("the events of staged copies", STAGE, "memory.events.append(end_of_queue(device))", "pass", STAGING),
    Mutation("the wait before memory is used again", STAGE, "memory.wait()  # for", "pass  # for", STAGING),
    Mutation(
        "the wait before a file is written",
        STAGE,
        "        memory.wait()\n        return memory\n",
        "        return memory\n",
        STAGING,
    ),
    Mutation("the wait for overlapped copies", STAGE, "memory.late.result()", "pass", OVERLAP),
    Mutation(
        "memory that an overlapped copy still fills", STAGE, " or (self.late is not None and not self.late.done())", "", OVERLAP
    ),
    Mutation("the fence before a step", LATE, "                wait(self._under_way)\n", "                pass\n", OVERLAP),
    Mutation("the check of versions", LATE, "if version_of(pair.source) != version:", "if False:", OVERLAP),
    Mutation("the copying stream's wait", LATE, "streams[device].wait_event(end)", "pass", STAGING),
    Mutation("the copying stream", LATE, "with on_stream(device, stream):", "if True:", STAGING),
    Mutation("the end of overlapped copies", LATE, "            stream.synchronize()\n", "", STAGING),
    Mutation("the wait for the streams of scalars", SCALARS, "own.wait_stream(stream)", "pass", VALUES),
    Mutation("the stream of fetches", SCALARS, "with on_stream(device, own):", "if True:", VALUES),
    Mutation(
        "scalars that are kept",
        SCALARS,
        "one.fetched = row, arrived",
        "one.fetched, one.tensor = (row, arrived), None",
        VALUES,
    ),
    Mutation(
        "the wait for scalars", SCALARS, "        arrived.synchronize()\n        return host", "        return host", VALUES
    ),
    Mutation("the events of captures", SNAPSHOT, "self._devices.add(device)", "pass", VALUES),
    Mutation("the wait for captures", SNAPSHOT, "            one.synchronize()\n", "            pass\n", VALUES),
    Mutation(
        "the device of another thread",
        DOOR,
        "partial(module.set_device, module.current_device()) if",
        "(lambda: None) if",
        LOOP,
    ),
    Mutation("random states that are loaded", DOOR, "module.set_rng_state(state, torch.device(kind, index))", "pass", LOOP),
    Mutation("random states that are saved", DOOR, "{kind: module.get_rng_state_all()}", "{}", LOOP),
    Mutation("batches that are queued", DOOR, "non_blocking=tensor.is_cpu and", "non_blocking=False and", LOOP),
]


def copied(target: Path) -> None:
    """Copy the files that git knows, and new ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")  # noqa: S603 - ours
    for name in filter(None, names):
        file = ROOT / name  # or a link to a folder
        if name.startswith(("eventloop/", "hooks/", "tests/", "trainbus/", "pyproject.toml")) and file.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / name, follow_symlinks=False)


def mutated(mutation: Mutation) -> str:
    """Return the text of the module with the mutation."""
    text = (ROOT / mutation.module).read_text()
    if text.count(mutation.text) != 1:
        raise ValueError(f"{mutation.module} has {mutation.text!r} {text.count(mutation.text)} times; name what occurs once")
    return text.replace(mutation.text, mutation.replacement)


def failing(mutation: Mutation, place: Path) -> str:
    """Return the first test that fails in the copy with the mutation; "" if all pass."""
    module, output = place / mutation.module, place / "output"
    before = module.read_text()
    module.write_text(mutated(mutation))
    child = os.fork()  # of a process that has imported all but the project: it would take most of the time
    if not child:
        try:
            os._exit(_test(place, output, mutation.tests))
        except BaseException:  # noqa: BLE001 - nothing of the parent's is to run here
            output.write_text(traceback.format_exc())
            os._exit(70)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    module.write_text(before)
    found = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", output.read_text(), re.MULTILINE)
    if code not in (0, 1) or (code == 1 and not found):
        raise RuntimeError(f"{mutation.without}: pytest ended with {code}\n{output.read_text()[-2000:]}")
    return found[1] if found else ""


def _test(place: Path, output: Path, tests: str) -> int:
    os.chdir(place)
    sys.path[:] = [str(place), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "eventloop", "hooks", "trainbus")]:
        del sys.modules[name]
    sys.stdout = sys.stderr = output.open("w")
    code = pytest.main(["-n0", "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", tests])
    sys.stdout.flush()
    return code


def main(chosen: list[int]) -> int:
    """Try mutations, say for each one which test fails, and return how many no test has found."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copied(place)
        for number in chosen or range(len(MUTATIONS)):
            mutation = MUTATIONS[number]
            test = failing(mutation, place)
            missed += not test
            place_in = Path(mutation.module).name
            sys.stdout.write(f"{number:2} {place_in:11} without {mutation.without}: {test or 'NO TEST FAILS'}\n")
            sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
