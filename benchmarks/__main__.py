"""``python -m benchmarks [NAME ...] [--quick] [--parts] [--out DIR]`` compares; those in ``main`` do not."""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks import crash, elastic, gpu, nvrx, ray_train, replicas, report, scale, soak, startup
from benchmarks.harness import Settings, environment

BENCHMARKS = (
    "bridges",
    "checkpoint",
    "costs",
    "dispatch",
    "ema",
    "exchange",
    "logging",
    "offload",
    "resuming",
    "savers",
    "sharded",
    "steps",
    "stores",
    "training",
)


def main() -> None:
    for name, alone in (
        ("soak", soak),
        ("crash", crash),
        ("elastic", elastic),
        ("nvrx", nvrx),
        ("gpu", gpu),
        ("ray", ray_train),
        ("scale", scale),
        ("startup", startup),
        ("torchft", replicas),
    ):  # not comparisons: they have their own options and verdicts
        if sys.argv[1:2] == [name]:
            alone.main(sys.argv[2:])
            return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="trainbus side by side with its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run (default all): {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="a few rounds only, to check that everything runs")
    parser.add_argument("--parts", action="store_true", help="training: each hook by itself, into training-parts.json")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="default: benchmarks/results")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"{', '.join(sorted(unknown))}: not a benchmark; the benchmarks are {', '.join(BENCHMARKS)}")

    if arguments.parts and arguments.names != ["training"]:
        parser.error("--parts works with one benchmark only: python -m benchmarks training --parts")

    where = environment()
    report.heading(where)
    for name in arguments.names or BENCHMARKS:
        with report.progress(name) as tick:
            comparisons = importlib.import_module(f"benchmarks.{name}").run(Settings(arguments.quick, arguments.parts, tick))
        report.tables(comparisons)
        for path in report.save(
            f"{name}-parts" if arguments.parts else name, comparisons, where, arguments.quick, arguments.out
        ):
            report.console.print(f"wrote {path}", style="dim")


if __name__ == "__main__":
    main()
