"""Measure a resume: the time until a new model and its optimizer have the saved state, and the memory that this takes.

Each resume is in a process of its own, all ways in turn. A small model is resumed first, so that imports do not count, and the
file is in the page cache. Memory is what the process has at most during the resume, beyond what it had before. A new optimizer
has no state yet, so its memory is in that. What each way restores is compared with what was saved.
"""

import gc
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.harness import SUBJECT, TIMES, Budget, Comparison, Settings, Tick, one_thread
from benchmarks.peers import Resume, Trained, handwritten, load, trainbus
from benchmarks.save_job import RESULT
from benchmarks.savers import alone
from benchmarks.saving import CHUNK, Size, files, place

FLOOR = "torch.load + load_state_dict"
PEERS = ("safetensors", "distributed")
MEMORY = 1.1
"""Times the floor's memory: the budget of row 12."""
TINY = Size(2, 10)


class Resumed(msgspec.Struct):
    """The measurements of one process."""

    seconds: float = 0.0
    memory: int = 0
    """Bytes."""


@dataclass(frozen=True)
class State:
    """A model, and its optimizer after one step."""

    size: Size
    optimizer: type[torch.optim.Optimizer]

    def __str__(self) -> str:
        return f"{self.size}, {self.optimizer.__name__} and its state"

    def new(self) -> Trained:
        model = self.size.model()
        return model, self.optimizer(model.parameters(), lr=0.5)

    def stepped(self) -> Trained:
        model, optimizer = self.new()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def check(self, restored: Trained, way: str) -> None:
        """Raise RuntimeError unless these have the saved state."""
        for found, saved in zip(tensors(restored), tensors(self.stepped()), strict=True):
            if not torch.equal(found, saved):
                raise RuntimeError(f"{way} restores another state")


def tensors(trained: Trained) -> list[torch.Tensor]:
    model, optimizer = trained
    state = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(part[name] for part in state for name in sorted(part))]


def run(settings: Settings) -> list[Comparison]:
    large, small = (Size(6, 200_000), Size(400, 1000)) if settings.quick else (Size(100, 1_000_000), Size(20_000, 1000))
    states = State(large, torch.optim.AdamW), State(small, torch.optim.SGD)
    comparisons = []
    for part, state in enumerate(states):

        def tick(done: int, rounds: int, before: int = part) -> None:
            settings.tick_part(before, len(states), done, rounds)

        with place() as directory:
            comparisons.append(compare(settings, state, directory, tick))
    return comparisons


def compare(settings: Settings, state: State, directory: Path, tick: Tick) -> Comparison:
    ways, left_out = resumes()
    rounds = settings.rounds(quick=1, full=5)
    paths = {name: directory / re.sub(r"\W+", "_", name) / "saved" for name in ways}
    for name, path in paths.items():
        path.parent.mkdir()
        alone(save, name, state, path, result=Resumed)
    found: dict[str, list[Resumed]] = {name: [] for name in ways}
    for done in range(rounds):
        for name, path in paths.items():
            found[name].append(alone(resume, name, state, path, result=Resumed))
        tick(done + 1, rounds)
    memory = {name: statistics.median(one.memory for one in each) for name, each in found.items()}
    ratios = {name: most / memory[FLOOR] for name, most in memory.items()}
    remarks = {name: f"memory {memory[name] / 1e6:,.0f} MB, {ratio:.2f} {TIMES}" for name, ratio in ratios.items()}
    remarks[SUBJECT] += f", {'pass' if ratios[SUBJECT] <= MEMORY else 'FAIL'}: {MEMORY} {TIMES}"
    samples = {name: [one.seconds for one in each] for name, each in found.items()}
    return Comparison(f"Resume: {state}", "ms", FLOOR, samples, budget=Budget(12, 1.3), left_out=left_out, remarks=remarks)


def resumes() -> tuple[dict[str, Resume], dict[str, str]]:
    """Return all ways to resume, and the reasons for those that cannot."""
    modules, left_out = load(PEERS)
    ways = {**handwritten.RESUMES, **trainbus.RESUMES}
    for module in modules.values():
        ways |= module.RESUMES
    return ways, left_out


def save(name: str, state: State, path: Path, result: Path) -> None:
    resumes()[0][name].save(state.stepped(), path)
    (result / RESULT).write_bytes(msgspec.json.encode(Resumed()))


def resume(name: str, state: State, path: Path, result: Path) -> None:
    way, tiny = resumes()[0][name], State(TINY, state.optimizer)
    with one_thread():
        way.save(tiny.stepped(), result / "tiny")
        way.resume(tiny.new(), result / "tiny")
        restored = state.new()
        read(path)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        start = time.perf_counter()
        way.resume(restored, path)
        seconds = time.perf_counter() - start
        found = Resumed(seconds, resident("VmHWM") - before)
        state.check(restored, name)
    (result / RESULT).write_bytes(msgspec.json.encode(found))


def resident(which: str) -> int:
    """Return memory of this process in bytes: ``VmRSS`` has it now, ``VmHWM`` at most."""
    (found,) = re.findall(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found)


def read(path: Path) -> None:
    """Read all files of a checkpoint into the page cache."""
    for each in files(path):
        if each.is_file():
            with each.open("rb", buffering=0) as file:
                while file.read(CHUNK):
                    pass
