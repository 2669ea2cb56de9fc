import json
from pathlib import Path

import torch

from trainbus.eventloop.checkpoint import load

from ..scripts import run_on_ranks

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "ddp.py"


def test_the_same_script_runs_alone_and_under_torchrun_and_resumes_across_both(example, tmp_path):
    example("ddp").make_loop(tmp_path / "alone", epochs=5).run()
    example("ddp").make_loop(tmp_path / "both", epochs=2).run()
    run = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    for ended in run_on_ranks(run, tmp_path, arguments=[tmp_path / "both"]):
        assert ended.returncode == 0, ended.stderr
    alone, both = (load(tmp_path / name / "epoch_5.safetensors") for name in ("alone", "both"))
    for name, value in alone["state_dict"].items():
        torch.testing.assert_close(both["state_dict"][name], value, rtol=1e-3, atol=1e-4)
    lines = (tmp_path / "both" / "scalars.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == sorted(set(steps)), "each line is written once"
