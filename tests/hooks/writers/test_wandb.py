import json

import pytest
import torch

from trainbus import media
from trainbus.eventloop import ConfigurationError
from trainbus.hooks import WandbWriter
from trainbus.hooks.writers import RunFacts, Where

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
            event.run.report(noise=media.Image(torch.ones(3, 2, 5)))
            event.run.report(grey=media.Image(torch.zeros(2, 5)))

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


def test_the_run_has_its_entity_group_tags_and_name(wandb, tmp_path):
    write(WandbWriter("digits", entity="ada", group="seeds", tags=["small", "fast"], name="trial"), tmp_path)
    run = next(one.run for one in records(files(tmp_path)[0]) if one.WhichOneof("record_type") == "run")
    found = (run.project, run.entity, run.run_group, sorted(run.tags), run.display_name)
    assert found == ("digits", "ada", "seeds", ["fast", "small"], "trial")


def test_further_options_of_wandb_init_are_passed_on_by_name(wandb, tmp_path):
    write(WandbWriter("digits", notes="with warm-up", job_type="trial"), tmp_path)
    run = next(one.run for one in records(files(tmp_path)[0]) if one.WhichOneof("record_type") == "run")
    assert (run.notes, run.job_type) == ("with warm-up", "trial")


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("job_typ", "job_type"),
        *((name, name) for name in ("config", "dir", "fork_from", "reinit", "resume", "resume_from", "settings")),
    ],
)
def test_an_option_that_wandb_init_lacks_or_that_the_writer_sets_itself_is_an_error(wandb, option, named):
    with pytest.raises(ConfigurationError, match=rf"\b{named}="):
        WandbWriter(**{option: "x"})


@pytest.mark.long
def test_a_run_of_wandb_is_continued_by_its_id_from_a_new_folder(wandb, tmp_path):
    for _ in range(2):
        write(WandbWriter("digits", id="abc123"), tmp_path)
    assert {path.name for path in files(tmp_path)} == {"run-abc123.wandb"}
    write(WandbWriter("digits", id="other"), tmp_path)
    write(WandbWriter("digits"), tmp_path)
    names = [path.name for path in files(tmp_path)]
    assert [names.count(f"run-{one}.wandb") for one in ("abc123", "other")] == [2, 2]


def test_an_online_run_is_made_and_continued_by_its_id(wandb, tmp_path, monkeypatch):
    """W&B's server is not here: what it would be asked for is noted."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    asked = []
    make = wandb.init

    def init(**options):
        asked.append(options)
        return make(**options | {"mode": "offline", "resume": None})

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        write(WandbWriter("digits", mode="online", entity="ada", tags="fast"), tmp_path)
    first, second = ({name: one[name] for name in ("mode", "entity", "tags", "id", "resume")} for one in asked)
    stored = (tmp_path / "wandb" / "run_id").read_text().strip()
    assert first == second == {"mode": "online", "entity": "ada", "tags": ("fast",), "id": stored, "resume": "allow"}


def test_an_online_run_without_an_api_key_is_an_error_at_once(wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="wandb login"):
        WandbWriter(mode="online")


def test_media_of_a_validation_after_a_resume_have_its_step(wandb, tmp_path):
    writer, where = WandbWriter(), Where("val", epoch=2, iter=20)
    writer.open(RunFacts("digits", tmp_path))
    writer.write_reported("val/text", "a sample", 2, where)
    writer.write_scalars({"val/loss": 0.5}, 2, where)
    writer.close()
    found = rows(files(tmp_path)[0])
    assert column(found, "val/step") == [(20, 2)]
    assert [step for step, _ in column(found, "val/text/path")] == [20]


def test_a_resumed_run_keeps_its_id(wandb, tmp_path):
    for step in (1, 2):
        write(WandbWriter(), tmp_path, (step, {"train/loss": 0.5}))
    first, second = files(tmp_path)
    assert first.name == second.name == f"run-{(tmp_path / 'wandb' / 'run_id').read_text().strip()}.wandb"


def test_two_runs_within_a_second_have_separate_folders(wandb, tmp_path):
    loop = logging_loop(WandbWriter(), work_dir=tmp_path)
    loop.run()
    loop.validate()
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
