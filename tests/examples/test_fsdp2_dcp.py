import warnings
from pathlib import Path
from typing import Any

import torch

from trainbus.cli import main
from trainbus.eventloop import Bus, TrainLoop
from trainbus.hooks import CheckpointHook

from ..ranks import meshes
from ..scripts import run_on_ranks

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "fsdp2_dcp.py"


@meshes.AVERAGES
def test_a_training_goes_from_two_processes_of_its_engine_to_a_run_and_back(example, tmp_path):
    run = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    for ended in run_on_ranks(run, tmp_path, arguments=[tmp_path / "theirs"]):
        assert ended.returncode == 0, ended.stderr
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), str(tmp_path / "ours.safetensors")]) == 0
    engine = example("fsdp2_dcp")
    model, optimizer = engine.parts()
    data = [torch.linspace(-3, 3, 64).unsqueeze(1)] * 20
    bus = Bus(CheckpointHook(interval=20, by_epoch=False))
    loop = TrainLoop(model, optimizer, step=engine.loss, train_data=data, max_iters=40, bus=bus, work_dir=tmp_path / "run")
    loop.run(resume=tmp_path / "ours.safetensors")
    back = tmp_path / "back"
    assert main(["checkpoint", "export", str(tmp_path / "run" / "iter_40.safetensors"), str(back), "--dcp"]) == 0
    losses = [ended.stdout.split()[-1] for ended in run_on_ranks(run, tmp_path, arguments=[tmp_path / "last", back])]

    for number in range(3):  # the same without us, on one process
        before = [str(tmp_path / f"alone-{number - 1}")] if number else []
        alone = alone_steps(engine, str(tmp_path / f"alone-{number}"), *before)
    assert all(abs(float(loss) - alone) < 1e-4 for loss in losses)


def alone_steps(engine: Any, *folders: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return engine.main(*folders)
