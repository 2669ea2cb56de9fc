"""``python -m benchmarks.readme [--check]``: write the tables in ``benchmarks/README.md`` and ``docs/engines/index.md``.

The figures come from the files in ``benchmarks/results/``.

``--check`` writes nothing, and fails if a table differs from the files.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.amounts import UNITS, amount
from benchmarks.bridge_figures import EMPTY
from benchmarks.harness import SUBJECT, TIMES

ROOT = Path(__file__).parent.parent
README = ROOT / "benchmarks" / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
ENGINES_PAGE = ROOT / "docs" / "engines" / "index.md"
ENGINES = (("Ray Train", "ray"), ("torchft", "torchft"), ("NVRx", "nvrx"))
WAYS = {("torchft", "own"): "torch.save, as in torchft's docs", ("ray", "Ray"): "torch.save, as in Ray's docs"}
DCP_WAYS = ("trainbus", "DCP save", "DCP async_save")
BEGIN, END = "<!-- figures: written by `python -m benchmarks.readme` -->", "<!-- end of figures -->"

ROWS: Sequence[tuple[str, str, str, Sequence[str]]] = (
    ("publish to ten no-op hooks", "ns", "dispatch", ["Ten no-op hooks"]),
    ("make an event without subscribers, publish it", "ns", "dispatch", ["No subscriber"]),
    ("EMA update, 10 M parameters in 600 tensors", "ms", "ema", ["One update"]),
    (
        "everything on (scalars each iteration, EMA, schedule, durable checkpoints), added per iteration",
        "µs",
        "training",
        ["Everything on"],
    ),
    ("the same job in epochs of 56 iterations", "µs", "training", ["The same in"]),
    ("environment steps in cleanrl's shape of DQN, everything on: an iteration", "µs", "steps", ["An environment step"]),
    ("`TrainLoop` without any hook, added per iteration", "µs", "training", ["No hook at all"]),
    ("six floats logged each iteration, on the training thread", "µs", "logging", ["Six floats"]),
    ("six 0-dim tensors logged each iteration, on the training thread", "µs", "logging", ["Six 0-dim tensors"]),
    (
        "checkpoint, training stands still: 200 tensors of 1 M; 20,000 of 1,000",
        "ms",
        "checkpoint",
        ["Training stands still: 200 ", "Training stands still: 20,000 "],
    ),
    (
        'the same with `staging="overlap"`: added to the next step',
        "ms",
        "checkpoint",
        ["Added to a step of .*: 200 ", "Added to a step of .*: 20,000 "],
    ),
    (
        "p99 of a step of Python while 20,000 tensors are saved",
        "ms",
        "checkpoint",
        ["A Python step beside saves of 20,000 tensors of 1,000, 80 MB: p99"],
    ),
    ("commit 800 MB, digest included", "ms", "checkpoint", ["Commit, digest included"]),
    ("18 MB checkpoints on a disk of 20 MB/s at half its load, per iteration", "ms", "checkpoint", ["18 MB every 2"]),
    (
        "30 M parameters with AdamW's state saved inside a trainer: worst step less the median",
        "ms",
        "savers",
        ["A save of 30 M"],
    ),
    ("the same with 100 M parameters", "ms", "savers", ["A save of 100 M"]),
    (
        "29 M parameters with AdamW's state under FSDP2, two processes: training stands still",
        "ms",
        "sharded",
        ["Stall of a sharded.* 2 processes"],
    ),
    (
        "weights of 30 M; 100 M parameters saved to an S3 server (moto): until durable",
        "ms",
        "stores",
        ["Weights of 30 M .*S3", "Weights of 100 M .*S3"],
    ),
    ("the same to a disk", "ms", "stores", ["Weights of 30 M .*disk", "Weights of 100 M .*disk"]),
    (
        "resume of 100 M parameters with AdamW's state; of 20,000 tensors of 1,000: verified",
        "ms",
        "resuming",
        ["Resume: 100 tensors", "Resume: 20,000"],
    ),
    ("a bus without subscribers in a trainer: added per iteration", "µs", "bridges", ["Added to an iteration"]),
    (
        "measuring where the time goes, steps of 1 ms; 5 ms: added per iteration",
        "µs",
        "costs",
        ["A step of 1", "A step of 5"],
    ),
)
"""Text of the row, unit, file, and patterns for the beginnings of the titles of its comparisons."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table differs from the files")
    check = parser.parse_args().check
    for page, make in ((README, table), (ENGINES_PAGE, engines_table)):
        text = page.read_text(encoding="utf-8")
        before, found, rest = text.partition(f"{BEGIN}\n")
        _, ended, after = rest.partition(END)
        if not found or not ended:
            sys.exit(f"{page} has no lines {BEGIN!r} and {END!r}")
        new = f"{before}{BEGIN}\n{make()}{END}{after}"
        if check and new != text:
            sys.exit(
                f"the table in {page.relative_to(ROOT)} differs from benchmarks/results: run `python -m benchmarks.readme`"
            )
        if not check:
            page.write_text(new, encoding="utf-8")


def engines_table() -> str:
    """Return the table of trainings that engines start again, beside the way that the engine's own documentation shows."""
    lines = [
        "| engine | saves by | failures | saves lost | stall per save, ms | trains again after, s |",
        "|---|---|---|---|---|---|",
    ]
    commits: dict[str, Mapping[str, Any]] = {}
    for engine, name in ENGINES:
        if not (path := RESULTS / f"{name}.json").exists():
            continue
        document = orjson.loads(path.read_bytes())
        commits[name] = document["environment"]
        for way, found in document.items():
            if isinstance(found, dict) and "strikes" in found:
                cells = (torchft_row if engine == "torchft" else engine_row)(found)
                lines.append(f"| {engine} | {WAYS.get((name, way), way)} | {len(found['strikes'])} | {' | '.join(cells)} |")
    document = commits["sharded"] = orjson.loads((RESULTS / "sharded.json").read_bytes())
    stalls, reads = (
        {each["name"]: each["median_seconds"] for each in the_one(document["comparisons"], title, "sharded")["contenders"]}
        for title in ("Stall of a sharded.* 2 processes", "Reading a sharded.* 2 processes")
    )
    for way in DCP_WAYS:
        after = f"{reads[way]:.2f} to read" if way in reads else ""
        lines.append(f"| FSDP2 and DCP | {way} | | | {1e3 * stalls[way]:.1f} | {after} |")
    return "\n".join([*lines, "", recorded(commits), ""])


def engine_row(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the cells saves lost, stall, and the time to train again."""
    again = [one["seconds"] for one in found["strikes"] if one["seconds"] is not None]
    lost = sum(one["lost_saves"] for one in found["strikes"])
    return str(lost), f"{1e3 * statistics.median(found['stalls']):.1f}", f"{statistics.median(again):.1f}"


def torchft_row(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the same cells where the other replica groups go on, and the one that died comes back."""
    saves = found["saves"]
    lost = max(0, len(saves["missing"]) + len(saves["damaged"]) - len(saves["made_up"]))
    pause, heals = (statistics.median(one[key] for one in found["strikes"]) for key in ("pause", "heals"))
    return str(lost), f"{1e3 * saves['stall']:.1f}", f"{pause:.1f} the others, {heals:.1f} the one that died"


def table() -> str:
    documents = {name: orjson.loads((RESULTS / f"{name}.json").read_bytes()) for _, _, name, _ in ROWS}
    lines = ["| measured | floor | trainbus | goal | others |", "|---|---|---|---|---|"]
    for measured, unit, name, titles in ROWS:
        found = [the_one(documents[name]["comparisons"], title, name) for title in titles]
        cells = zip(*(CELLS.get(name, row)(comparison, unit) for comparison in found), strict=True)
        lines.append(f"| {measured} | {' | '.join('; '.join(dict.fromkeys(filter(None, column))) for column in cells)} |")
    lines += [
        "",
        f"Two shared cores ({documents['dispatch']['cpu']}), {documents['dispatch']['python']}. {recorded(documents)}",
    ]
    return "\n".join(lines) + "\n"


def the_one(comparisons: Sequence[Mapping[str, Any]], title: str, name: str) -> Mapping[str, Any]:
    found = [comparison for comparison in comparisons if re.match(title, comparison["title"])]
    if len(found) != 1:
        sys.exit(f"benchmarks/results/{name}.json has {len(found)} comparisons whose title begins with {title!r}, not one")
    return found[0]


def row(comparison: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    """Return the cells floor, trainbus, goal, others."""
    figures = {each["name"]: each for each in comparison["contenders"]}
    floor, budget = comparison["floor"], comparison["budget"]
    ours = figures[SUBJECT]
    ratio = "" if budget["seconds"] else f", {ours['ratio_to_floor']:.2f} {TIMES}"
    figure = f"{amount(ours['median_seconds'], unit)} {unit}{ratio}" if ours["median_seconds"] > 0 else "within the noise"
    goal = f"{budget['seconds'] * UNITS[unit]:g} {unit}" if budget["seconds"] else f"{budget['limit']:.3g} {TIMES}"
    others = sorted(
        (each["median_seconds"], name) for name, each in figures.items() if name != floor and not name.startswith(SUBJECT)
    )
    return (
        f"{floor}, {amount(figures[floor]['median_seconds'], unit)} {unit}",
        f"{figure}{'' if budget['met'] else ', **missed**'}",
        f"≤ {goal}",
        " · ".join(f"{name} {amount(seconds, unit)}" for seconds, name in others) + (f" {unit}" if others else ""),
    )


def savers_row(comparison: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    """Return the same cells for checkpoints inside trainers, where each way has the copy in its own process beside it."""
    ways = comparison["contenders"]
    ours = [way for way in ways if way["name"].startswith(SUBJECT)]
    stalls = [
        f"{way['name'].removeprefix(SUBJECT).strip()} {amount(way['stall_seconds'], unit)} {unit}, "
        f"{way['ratio_to_copy']:.2f} {TIMES}{'' if way['budget_met'] else ', **missed**'}"
        for way in ours
    ]
    others = [f"{way['name']} {amount(way['stall_seconds'], unit)}" for way in ways if way not in ours]
    copy = statistics.median(way["copy_seconds"] for way in ways)
    floor = f"{comparison['floor']}, {amount(copy, unit)} {unit}"
    return floor, " · ".join(stalls), f"≤ {comparison['budget']['limit']:g} {TIMES}", f"{' · '.join(others)} {unit}"


def stores_row(comparison: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    """Return the same cells for saves to a store or a disk: the time until they are durable, and the stall."""
    ways = {way["name"]: way for way in comparison["contenders"]}
    floor, plain, ours = (ways.pop(name) for name in (comparison["floor"], comparison["reference"], SUBJECT))
    stall, durable = (comparison["budget"][what] for what in ("stall", "durable"))
    missed = {True: "", False: ", **missed**"}
    figure = f"{amount(ours['durable_seconds'], unit)} {unit}, {ours['durable_over_reference']:.2f} {TIMES} of {plain['name']}"
    figure += missed[durable is None or durable["met"]]
    figure += f", stall {amount(ours['stall_seconds'], unit)} {unit}, {ours['stall_over_copy']:.2f} {TIMES} one copy"
    figure += missed[stall["met"]]
    for name in [name for name in ways if name.startswith(SUBJECT)]:  # with another library underneath
        other = ways.pop(name)
        ratio = f"{other['durable_over_reference']:.2f} {TIMES}"
        figure += f" · with{name.removeprefix(f'{SUBJECT},')} {amount(other['durable_seconds'], unit)} {unit}, {ratio}"
    goals = [f"stall ≤ {stall['limit']:g} {TIMES} one copy"]
    if durable is not None:
        goals.insert(0, f"≤ {durable['limit']:g} {TIMES} of {plain['name']}")
    others = [f"{way['name']} {amount(way['durable_seconds'], unit)}" for way in (plain, *ways.values())]
    return (
        f"{floor['name']}, {amount(floor['durable_seconds'], unit)} {unit}",
        figure,
        ", ".join(goals),
        f"{' · '.join(others)} {unit}",
    )


def bridges_row(comparison: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    """Return the same cells for buses in trainers, beside an empty callback."""
    ways = comparison["contenders"]
    added: dict[str, list[str]] = {SUBJECT: [], EMPTY: []}
    for way in ways:
        missed = ", **missed**" if way["budget_met"] is False else ""
        added.get(way["name"], []).append(f"{way['trainer']} {amount(way['median_seconds'], unit)}{missed}")
    alone = {way["trainer"]: amount(way["alone_seconds"], unit) for way in ways}
    floor = f"the trainer alone: {' · '.join(' '.join(each) for each in alone.items())} {unit}"
    ours, empty = (" · ".join(each) for each in added.values())
    return floor, f"{ours} {unit}", f"≤ {comparison['budget']['seconds'] * UNITS[unit]:g} {unit}", f"{EMPTY}: {empty} {unit}"


def costs_row(comparison: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    """Return the same cells for profilers, each beside its own system's loop."""
    texts = {
        way["name"]: f"{amount(way['median_seconds'], unit)} {unit}, {way['share']:.1%}"
        + (", **missed**" if way["budget_met"] is False else "")
        for way in comparison["contenders"]
    }
    ours = texts.pop(SUBJECT)
    others = " · ".join(f"{name} {text}" for name, text in texts.items() if not name.startswith(SUBJECT))
    budget = comparison["budget"]
    return "the same loop without it", ours, "" if budget is None else f"≤ {budget['share']:.0%}", others


CELLS = {"savers": savers_row, "stores": stores_row, "bridges": bridges_row, "costs": costs_row}


def recorded(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence that names the commit of each file."""
    commits: dict[str, list[str]] = {}
    for name, document in sorted(documents.items()):
        commits.setdefault(document.get("commit", "an older commit"), []).append(name)
    return "Recorded at " + "; ".join(f"{commit} ({', '.join(names)})" for commit, names in commits.items()) + "."


if __name__ == "__main__":
    main()
