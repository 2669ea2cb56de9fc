"""Check the output and the files of the demo.

python .ci/check_demo.py LOG RUN_DIR            # accuracy, a good checkpoint, the best one, the scalars
python .ci/check_demo.py --again LOG RUN_DIR    # a later run went elsewhere
"""

import re
import sys
from pathlib import Path

from trainbus.eventloop.checkpoint import load, verify

WANTED = 0.95


def main() -> None:
    """Exit with a message at the first failed check."""
    again = "--again" in sys.argv
    log, run_dir = (Path(argument) for argument in sys.argv[-2:])
    text = log.read_text()
    if again:
        expect(
            f"{run_dir.name}-2" in text or f"{run_dir.name.rsplit('-', 1)[0]}-" in text, f"the second run wrote to {run_dir}"
        )
        return
    averaged, raw = (float(figure) / 100 for figure in re.findall(r"(?:raw|averaged) weights (\d+\.\d+)%", text))
    expect(averaged >= WANTED, f"test accuracy {averaged:.2%} (raw weights {raw:.2%}) is below {WANTED:.0%}")
    expect(averaged > raw, f"the averaged weights ({averaged:.2%}) are no better than the raw ones ({raw:.2%})")
    newest = run_dir / (run_dir / "last_checkpoint").read_text().strip()
    verify(newest)
    expect(set(load(newest)) >= {"state_dict", "optimizer", "progress"}, f"{newest} lacks parts of a run's state")
    expect(len(list(run_dir.glob("best_accuracy_*.safetensors"))) == 1, f"not exactly one best checkpoint in {run_dir}")
    lines = sum(len(path.read_text().splitlines()) for path in run_dir.glob("*.jsonl"))
    expect(lines >= 30, f"{lines} lines of scalars in {run_dir}")
    print(f"accuracy {raw:.2%} raw, {averaged:.2%} averaged; {newest.name} loads; {lines} lines of scalars")


def expect(condition: bool, otherwise: str) -> None:
    """Exit with ``otherwise`` unless ``condition``."""
    if not condition:
        sys.exit(f"demo: {otherwise}")


if __name__ == "__main__":
    main()
