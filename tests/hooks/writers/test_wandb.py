import json

import pytest
import torch

from hooks import WandbWriter
from hooks.writers import RunFacts

from .conftest import logging_loop, write
from .readers import column, exits, files, records, rows

pytestmark = [pytest.mark.usefixtures("offline")]


@pytest.fixture
def wandb():
    return pytest.importorskip("wandb")


def test_logged_data_and_images_are_readable_from_the_wandb_file(wandb, tmp_path):
    from PIL import Image

    def report(event):
        if event.progress.iter == 1:
            event.run.report_image("noise", torch.ones(3, 2, 5))
            event.run.report_image("grey", torch.zeros(2, 5))

    config = {"lr": 0.1, "model": {"depth": 3}}
    logging_loop(WandbWriter("digits"), work_dir=tmp_path, name="first", config=config, every=report).run()
    (path,) = files(tmp_path)
    found = rows(path)
    assert column(found, "train/step") == [(step, step) for step in range(1, 7)]
    assert column(found, "val/step") == [(3, 1), (6, 2)]
    run = next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("digits", "first")
    assert exits(path) == [0]
    updates = {item.key or "/".join(item.nested_key): item for record in records(path) for item in record.config.update}
    assert [json.loads(updates[name].value_json) for name in ("lr", "model")] == [0.1, {"depth": 3}]
    ((step, image),) = column(found, "train/noise/path")
    assert step == 2
    picture = Image.open(path.parent / "files" / image)
    assert (picture.size, picture.getpixel((0, 0))) == ((5, 2), (255, 255, 255))
    assert [step for step, _ in column(found, "train/grey/path")] == [2]


def test_a_resumed_run_keeps_its_id(wandb, tmp_path):
    for step in (1, 2):
        write(WandbWriter(), tmp_path, (step, {"train/loss": 0.5}))
    first, second = files(tmp_path)
    assert first.name == second.name == f"run-{(tmp_path / 'wandb' / 'run_id').read_text().strip()}.wandb"


def test_two_runs_within_a_second_have_separate_folders(wandb, tmp_path):
    loop = logging_loop(WandbWriter(), work_dir=tmp_path)
    loop.run()
    loop.val()
    first, second = files(tmp_path)
    assert len(column(rows(first), "train/loss")) == 6
    assert [value for _, value in column(rows(second), "val/accuracy")] == [1.25]


def test_the_users_own_wandb_run_is_not_changed(wandb, tmp_path):
    writer = WandbWriter()
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True)) as mine:
        writer.open(RunFacts("digits", tmp_path / "run"))
        assert wandb.run is mine
        writer.close()
        mine.log({"a": 1})
