"""TraceML: the hand-written loop under ``traceml run``, with ``trace_step`` around each iteration.

It patches torch for the whole process and starts another process beside it. So each training is a process with several jobs
one after the other, and so is the hand-written loop that it is compared with.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import traceml_ai

from benchmarks.digits import Batch, Clocked, Job
from benchmarks.harness import one_thread, paused_gc
from benchmarks.peers import IN_THE_REST, Told, handwritten

ROOT = Path(__file__).parent.parent.parent
# Not a file in this folder, whose names would hide other modules.
SCRIPT = "from benchmarks.peers.traceml import main\nmain()\n"

TOLD = Told(IN_THE_REST, IN_THE_REST, shows=("Residual",), hides=("torch.save", "scalars"))


def traced(job: Job) -> Iterator[Batch]:
    for batch in handwritten.epochs(job):
        with traceml_ai.trace_step(job.model):
            yield batch


def seconds(sizes: Sequence[tuple[int, int]], repeats: int, *, with_traceml: bool) -> tuple[list[list[float]], str]:
    """Train in a separate process.

    Args:
        sizes: pairs of the width of a model and a number of iterations.
        repeats: number of runs of each job.
        with_traceml: True to train under TraceML.

    Returns:
        Seconds per iteration, a list for each size; and what was printed, TraceML's report.
    """
    with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory:
        script, out = Path(directory, "job.py"), Path(directory, "out.json")
        script.write_text(SCRIPT)
        told = [json.dumps(sizes), str(repeats), str(with_traceml), str(out)]
        launcher = ["-m", "traceml_ai.launcher.cli", "run", str(script), "--logs-dir", f"{directory}/logs", "--run-name", "job"]
        command = [sys.executable, *([*launcher, "--args"] if with_traceml else [str(script)]), *told]
        # Its children look for the commands of this interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)  # noqa: S603
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"{command} ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text()), done.stdout


def main() -> None:
    """Train in that process: each job once to warm up, and then ``repeats`` times."""
    sizes, repeats, with_traceml, out = sys.argv[1:]
    batches = handwritten.epochs
    if with_traceml == "True":
        traceml_ai.init(mode="auto")
        batches = traced
    with one_thread():
        found = [[sample(width, number, batches) for _ in range(int(repeats) + 1)][1:] for width, number in json.loads(sizes)]
    Path(out).write_text(json.dumps(found))


def sample(width: int, iterations: int, batches: Callable[[Job], Iterator[Batch]]) -> float:
    job = Clocked(iterations, hidden=width)
    with tempfile.TemporaryDirectory(prefix="trainbus-bench-") as directory, paused_gc():
        handwritten.train(job, Path(directory), batches)
    return job.seconds()
