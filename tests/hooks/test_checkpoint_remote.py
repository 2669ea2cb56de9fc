"""CheckpointHook with a URL: the same files, names, order and failures as in a directory."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from structlog.testing import capture_logs

from trainbus.eventloop import CheckpointError, ConfigurationError
from trainbus.eventloop.checkpoint import load, scores_of
from trainbus.hooks import CheckpointHook

from ..failing import fails
from .conftest import scored

OUT = "memory://bucket"
URL = "memory://bucket/run"
"""Of a run whose work dir is named so."""


pytestmark = pytest.mark.usefixtures("memory")


def test_files_and_the_best_stay_as_in_a_directory(job, tmp_path, there):
    scored(tmp_path / "run", CheckpointHook(1, out_dir=OUT, max_keep_ckpts=2, save_best="acc"), 0.1, 0.5, 0.3, 0.4).run()
    assert there() == {"epoch_3", "epoch_4", "best_acc_epoch_2", "last_checkpoint"}
    assert load(f"{URL}/best_acc_epoch_2.safetensors")["progress"]["epoch"] == 2


def test_each_file_in_a_store_has_the_score_of_its_own_validation(tmp_path):
    scored(tmp_path / "run", CheckpointHook(1, out_dir=OUT, save_best="acc"), 0.1, 0.5, 0.3).run()
    scores = {name: scores_of(f"{URL}/{name}.safetensors") for name in ("epoch_1", "epoch_2", "best_acc_epoch_2", "epoch_3")}
    assert [one["acc"] for one in scores.values()] == [0.1, 0.5, 0.5, 0.3]


@pytest.mark.parametrize("resume", ["auto", f"{URL}/epoch_2.safetensors"])
@pytest.mark.parametrize("place", ["the same", "a new machine"])
def test_a_run_resumes_from_the_newest_file_in_both_places(job, tmp_path, memory, resume, place):
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "the same" / "run").run()
    assert memory.cat_file("/bucket/run/last_checkpoint") == b"epoch_2.safetensors"
    assert (tmp_path / "the same" / "run" / "last_checkpoint").read_text() == "epoch_2.safetensors"
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / place / "run", max_epochs=3).run(resume=resume)
    straight = job.loop(CheckpointHook(1), work_dir=tmp_path / "straight" / "run", max_epochs=3)
    straight.run()
    assert job.same(load(f"{URL}/epoch_3.safetensors")["state_dict"], straight.model.state_dict())


def test_auto_prefers_the_place_that_was_saved_to_last(job, tmp_path):
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "one" / "run", max_epochs=1).run()
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "other" / "run", max_epochs=2).run(resume="auto")
    began: list[int] = []
    loop = job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "one" / "run", max_epochs=3)
    loop.bus.on("before_train", lambda event: began.append(event.progress.epoch))
    loop.run(resume="auto")
    assert began == [2]


def test_a_remote_last_checkpoint_naming_another_store_is_ignored(job, tmp_path, memory):
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "run", max_epochs=1).run()
    job.loop(CheckpointHook(1, out_dir="memory://other"), work_dir=tmp_path / "other" / "run", max_epochs=2).run()
    for place in ("memory://other", "../../other", "/other"):
        memory.pipe_file("/bucket/run/last_checkpoint", f"{place}/run/epoch_2.safetensors".encode())
        began: list[int] = []
        loop = job.loop(CheckpointHook(out_dir=OUT, save_last=False), work_dir=tmp_path / "run", max_epochs=3)
        loop.bus.on("before_train", lambda event, began=began: began.append(event.progress.epoch))
        with capture_logs() as logs:
            loop.run(resume="auto")
        assert began == [1]
        assert any("does not name a file in a directory of this run" in entry["event"] for entry in logs)


def test_a_store_that_does_not_answer_is_an_error_and_no_older_checkpoint(job, tmp_path, monkeypatch):
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "run").run()

    monkeypatch.setattr(MemoryFileSystem, "open", fails(TimeoutError("no answer")))
    with pytest.raises(CheckpointError, match=r"memory://bucket/run/.*no answer"):
        job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "run", max_epochs=3).run(resume="auto")


@pytest.mark.parametrize(("staging", "busy"), [("block", "wait"), ("overlap", "skip"), ("overlap", "replace")])
def test_staging_and_busy_are_those_of_a_directory(job, tmp_path, there, staging, busy):
    hook = CheckpointHook(1, by_epoch=False, out_dir=OUT, staging=staging, busy=busy)
    job.loop(hook, work_dir=tmp_path / "run", max_iters=6).run()
    assert {"iter_6", "last_checkpoint"} <= there()
    assert load(f"{URL}/iter_6.safetensors")["progress"]["iter"] == 6
    assert busy != "wait" or len(there()) == 7


def test_two_hooks_save_locally_and_remotely_with_one_write_and_published_copies(job, tmp_path, memory, there):
    hooks = CheckpointHook(1, name="here"), CheckpointHook(1, out_dir=OUT, published_keys="state_dict", name="there")
    job.loop(*hooks, work_dir=tmp_path / "run").run()
    assert memory.cat_file("/bucket/run/epoch_2.safetensors") == (tmp_path / "run" / "epoch_2.safetensors").read_bytes()
    (published,) = (name for name in there() if name.startswith("epoch_2-"))
    assert list(load(f"{URL}/{published}.safetensors")) == ["state_dict"]


def test_a_store_is_asked_for_no_copy_and_no_checkpoint_is_read_back(job, tmp_path, monkeypatch, there):
    """The best file of an epoch that was saved already, and the published copies, are uploaded from this machine."""
    read, real = [], MemoryFileSystem.open

    def record(self, path, mode="rb", **options):
        read.append(path) if mode == "rb" and path.endswith(".safetensors") and "-" not in path else None
        return real(self, path, mode, **options)

    for name in ("cp_file", "mv", "copy"):
        monkeypatch.setattr(MemoryFileSystem, name, fails(AssertionError(name)))
    monkeypatch.setattr(MemoryFileSystem, "open", record)
    seen = []
    hook = CheckpointHook(1, out_dir=OUT, save_best="acc")
    loop = scored(tmp_path / "run", hook, 0.1, 0.5)
    loop.bus.on("after_run", lambda event: (event.run.checkpoints.wait(), seen.extend(read)), priority="HIGHEST")
    loop.run()
    assert there() == {"epoch_1", "epoch_2", "best_acc_epoch_2", "last_checkpoint"}
    assert not seen
    assert load(f"{URL}/best_acc_epoch_2.safetensors")["progress"]["epoch"] == 2


def test_of_two_runs_into_one_directory_the_second_adds_and_replaces_nothing(job, tmp_path, memory):
    """Both begin before either has saved. What it could not upload stays in its work dir."""
    first = job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "one/run", max_epochs=2)
    second = job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "two/run", max_epochs=3)
    contents: dict[str, bytes] = {}

    def train_first(event):
        first.run()
        contents.update({name: memory.cat_file(name) for name in memory.store})

    second.bus.on("before_train", train_first)
    second.bus.on("after_train_iter", lambda event: event.run.set_lr(0.5), once=1)
    with pytest.raises(CheckpointError, match=f"{URL}/epoch_1.safetensors.*out_dir="):
        second.run()
    assert {name: memory.cat_file(name) for name in memory.store} == contents
    assert (tmp_path / "two/run/epoch_3.safetensors").exists()


def test_a_run_may_replace_its_own_files_and_those_that_it_resumed_among(job, tmp_path, memory):
    job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "run", max_epochs=2).run()
    before = memory.cat_file("/bucket/run/epoch_2.safetensors")
    again = job.loop(CheckpointHook(1, out_dir=OUT), work_dir=tmp_path / "run", max_epochs=2)
    again.bus.on("after_train_iter", lambda event: event.run.set_lr(0.5), once=1)
    again.run(resume=f"{URL}/epoch_1.safetensors")
    assert memory.cat_file("/bucket/run/epoch_2.safetensors") != before


def test_a_request_for_a_url_is_refused_with_the_way_to_it(job, tmp_path):
    loop = job.loop(work_dir=tmp_path / "run")
    loop.bus.on("after_train_epoch", lambda event: event.run.checkpoints.save("x.safetensors", directory=URL))
    with pytest.raises(ConfigurationError, match=f"saved on this machine first. CheckpointHook.out_dir='{URL}'"):
        loop.run()


@pytest.mark.parametrize("options", [{}, {"out_dir": "elsewhere"}, {"out_dir": URL, "local_dir": URL}], ids=str)
def test_a_local_directory_is_for_a_url(options):
    with pytest.raises(ConfigurationError, match="local_dir="):
        CheckpointHook(**{"local_dir": "here", **options})


def test_files_wait_where_local_dir_says(job, tmp_path, there):
    job.loop(CheckpointHook(1, out_dir=OUT, local_dir=tmp_path / "memory"), work_dir=tmp_path / "run").run()
    assert {path.name for path in (tmp_path / "memory/run").glob("*.safetensors")} == {"epoch_2.safetensors"}
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert (tmp_path / "run/last_checkpoint").read_text() == "../memory/run/epoch_2.safetensors"
    assert there() == {"epoch_1", "epoch_2", "last_checkpoint"}


def test_hooks_of_one_store_wait_in_one_place(job, tmp_path):
    hooks = [CheckpointHook(1, out_dir=OUT, name="a"), CheckpointHook(1, out_dir=OUT, local_dir=tmp_path / "b", name="b")]
    with pytest.raises(ConfigurationError, match="several local_dir="):
        job.loop(*hooks, work_dir=tmp_path / "run").run()


def test_a_new_run_without_a_work_dir_leaves_the_files_of_another_one_that_wait(job, tmp_path, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "put_file", fails(OSError(28, "quota")))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="quota"):
            job.loop(CheckpointHook(1, out_dir=URL, local_dir=tmp_path / "here"), max_epochs=1).run()
    assert [path.parent.name for path in sorted(tmp_path.rglob("epoch_1.safetensors"))] == ["here", "here-2"]
