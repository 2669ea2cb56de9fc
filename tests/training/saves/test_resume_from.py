"""What a run may be told to go on from, and ``peek`` tells of: directories, here and elsewhere, and what does not fit."""

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from trainbus.cli import main
from trainbus.convert import export_tree, load_pth
from trainbus.eventloop import (
    Bus,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    Update,
    load_weights,
)
from trainbus.eventloop.checkpoint import load, save
from trainbus.eventloop.training import peek
from trainbus.eventloop.training.folders import has_run
from trainbus.eventloop.training.saves.discover import newest_first
from trainbus.hooks import CheckpointHook, EMAHook

from ..conftest import assert_same

pytestmark = pytest.mark.usefixtures("logs")  # what is wrong with a file is drawn there: a tenth of a second


def saving(parts, work_dir, resume=None, bus=None, **options):
    """Three files, each an epoch further."""
    bus = bus or Bus()
    bus.on("after_train_epoch", lambda e: e.run.checkpoints.save(f"epoch_{e.progress.epoch + 1}.safetensors"))
    parts.loop(bus, work_dir=work_dir, **{"max_epochs": 3, "val_data": None} | options).run(resume=resume)
    return work_dir


def began(parts, resume, out_dir=None, **options):
    """Return how many iterations the run had when it went on, and from where."""
    bus, seen = Bus(), []
    if out_dir is not None:
        bus.on("before_run", lambda e: e.run.checkpoints.keeps_in(out_dir))
    bus.on("before_train", lambda e: seen.append((e.progress.iter, e.run.checkpoints.resumed_from)))
    parts.loop(bus, val_data=None, **{"max_epochs": 3} | options).run(resume=resume)
    return seen[0]


@pytest.mark.parametrize("copied", [False, True])
def test_from_a_directory_and_a_copy_of_it_the_newest_good_checkpoint_in_it_is_taken(parts, tmp_path, copied):
    saving(parts, tmp_path)
    if copied:  # and so the older files may have the newer times
        for age, name in enumerate(sorted(path.name for path in tmp_path.iterdir())):
            os.utime(tmp_path / name, (2e9 - age, 2e9 - age))
    assert began(parts, tmp_path) == (9, tmp_path / "epoch_3.safetensors")
    parts.damage(tmp_path / "epoch_3.safetensors")
    assert began(parts, str(tmp_path)) == (6, tmp_path / "epoch_2.safetensors")
    (tmp_path / "epoch_3.safetensors").unlink()
    (tmp_path / "last_checkpoint").unlink()
    assert began(parts, "auto", work_dir=tmp_path) == (6, tmp_path / "epoch_2.safetensors")


def test_a_path_that_is_damaged_missing_or_no_checkpoint_and_a_folder_with_only_damaged_files_are_errors(parts, tmp_path):
    path = saving(parts, tmp_path, max_epochs=1) / "epoch_1.safetensors"
    parts.damage(path)
    for resume in (path, "auto", tmp_path):
        with pytest.raises(CheckpointDamagedError):
            began(parts, resume, work_dir=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r'nowhere\.safetensors.*resume="auto"') as gone:
        began(parts, tmp_path / "nowhere.safetensors")
    assert isinstance(gone.value, FileNotFoundError)
    save({"state_dict": {}}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError):
        began(parts, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigurationError, match="give work_dir="):
        began(parts, "auto")


@pytest.mark.parametrize(
    "content",
    [
        *(None, b"", b"\n", b".", b"..", b"gone.safetensors", b"epoch_1.safetensor", b"nowhere/epoch_1.safetensors"),
        *(b"/epoch_1.safetensors", b"x" * 5000, b"\0epoch_1.safetensors", b"\xff\xfe", b"last_checkpoint"),
        *(b"epoch_1.safetensors\0\0\0", b"number.safetensors", b"list.safetensors", b"dict.safetensors"),
        b"folder.safetensors",
    ],
)
def test_auto_handles_an_invalid_last_checkpoint_and_passes_over_files_that_were_never_of_a_run(parts, tmp_path, content):
    saving(parts, tmp_path, max_epochs=1)
    for name, tree in {"number": 3, "list": [1, 2], "dict": {"state_dict": {}}}.items():
        save(tree, tmp_path / f"{name}.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    pointer = tmp_path / "last_checkpoint"
    pointer.unlink() if content is None else pointer.write_bytes(content)
    assert began(parts, "auto", work_dir=tmp_path) == (3, tmp_path / "epoch_1.safetensors")


def test_a_large_file_is_checked_to_its_end_before_a_model_loads_any_of_it(parts, tmp_path):
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = parts.model(), torch.nn.Parameter(torch.zeros(3 << 20))
            self.loaded = []

        def forward(self, batch):
            return self.body(batch) + self.extra[0]

        def load_state_dict(self, state, *args, **options):
            self.loaded.append(state["extra"][0].item())
            return super().load_state_dict(state, *args, **options)

    bus, model = Bus(), Wide()
    bus.on("after_train_epoch", lambda e: model.extra.data.fill_(e.progress.epoch + 1.0), priority=90)
    saving(parts, tmp_path, bus=bus, model=model)
    newest = tmp_path / "epoch_3.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    model = Wide()
    with pytest.raises(CheckpointDamagedError):
        parts.loop(Bus(), model=model, val_data=None, max_epochs=3).run(resume=newest)
    assert not model.loaded
    assert not model.extra.any()
    assert began(parts, "auto", work_dir=tmp_path, model=model) == (6, tmp_path / "epoch_2.safetensors")
    assert len(model.loaded) == 1


@pytest.mark.parametrize("named", [[], ["epoch_2"], ["epoch_3", "missing"]])
def test_the_progress_in_each_file_is_read_once(named):
    files, read = {Path(f"epoch_{number}"): float(number) for number in (1, 2, 3)}, []

    def far(path):
        read.append(path)
        return (int(path.name[-1]),) if path in files else None

    order = [path.name for path in newest_first(files, map(Path, named), far) if path in files]
    assert order == ["epoch_3", "epoch_2", "epoch_1"]
    assert len(read) == len(set(read))


def test_a_resumed_run_holds_no_second_copy_of_the_weights(parts, tmp_path):
    path = saving(parts, tmp_path, max_epochs=1) / "epoch_1.safetensors"
    bus, read = Bus(), []
    bus.on("after_load_checkpoint", lambda e: read.extend(map(weakref.ref, e.checkpoint["state_dict"].values())))
    bus.on("before_train", lambda e: read.append([one() for one in read]))
    gc.disable()
    try:
        parts.loop(bus, max_epochs=2).run(resume=path)
    finally:
        gc.enable()
    assert len(read) > 1
    assert not any(one is not None for one in read[-1])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_auto_uses_the_file_before_an_unreadable_one_and_saves_under_its_name_again(parts, tmp_path, logs, monkeypatch, number):
    saving(parts, tmp_path)
    whole = load(tmp_path / "epoch_3.safetensors")
    real = Path.open

    def refuse(self, *args, **options):
        if self.name == "epoch_3.safetensors" and args == ("rb",):
            raise OSError(number, os.strerror(number))
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert has_run(tmp_path)
    assert began(parts, "auto", work_dir=tmp_path) == (6, tmp_path / "epoch_2.safetensors")
    saving(parts, tmp_path, resume="auto")
    monkeypatch.undo()
    assert_same(load(tmp_path / "epoch_3.safetensors")["state_dict"], whole["state_dict"])
    assert_same(load(tmp_path / "epoch_3.safetensors.old")["state_dict"], whole["state_dict"])
    (told,) = [entry for entry in logs if entry.get("to") == str(tmp_path / "epoch_3.safetensors.old")]
    assert os.strerror(number) in told["error"]


@pytest.mark.parametrize("name", ["epoch_2.safetensors", "last_checkpoint"])
@pytest.mark.parametrize("kind", ["directory", "dangling link", "FIFO"])
def test_what_is_no_file_makes_way_for_one_of_its_name(parts, tmp_path, logs, name, kind):
    saving(parts, tmp_path, max_epochs=1)
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "directory":
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    elif kind == "FIFO":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(tmp_path / "nothing")
    saving(parts, tmp_path, resume="auto")
    assert load(tmp_path / "epoch_2.safetensors")["progress"]["iter"] == 6
    assert (tmp_path / "last_checkpoint").read_text() == "epoch_3.safetensors"
    if kind == "directory":
        assert (tmp_path / f"{name}.old" / "kept").exists()
        assert [entry["to"] for entry in logs if "to" in entry] == [str(tmp_path / f"{name}.old")]
    assert not (tmp_path / "nothing").exists()


def test_of_two_directories_in_a_copy_the_one_with_more_progress_is_resumed(parts, tmp_path):
    saving(parts, tmp_path / "run", max_epochs=1)
    saving(parts, tmp_path / "out")
    os.utime(tmp_path / "run" / "last_checkpoint", (2e9, 2e9))
    assert began(parts, "auto", out_dir=tmp_path / "out", work_dir=tmp_path / "run") == (
        9,
        tmp_path / "out/epoch_3.safetensors",
    )


def test_a_damaged_newest_file_gives_way_to_none_of_a_longer_training_before_in_the_same_directory(parts, tmp_path):
    saving(parts, tmp_path)
    saving(parts, tmp_path, resume=tmp_path / "epoch_1.safetensors", max_epochs=2)
    file = tmp_path / "epoch_2.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the digest: how far it has come can be read
    file.write_bytes(data)
    assert began(parts, "auto", work_dir=tmp_path) == (3, tmp_path / "epoch_1.safetensors")


@pytest.mark.parametrize("step", [1, 0], ids=["times", "equal times"])  # a copy may have one time for all files
def test_the_newest_complete_save_is_taken_if_the_process_was_killed_before_last_checkpoint_named_it(
    parts, tmp_path, capsys, step
):
    saving(parts, tmp_path)
    (tmp_path / "last_checkpoint").write_text("epoch_2.safetensors")
    for age, epoch in enumerate((3, 2, 1)):
        os.utime(tmp_path / f"epoch_{epoch}.safetensors", (1e9 - step * age, 1e9 - step * age))
    for resume in ("auto", tmp_path):
        assert began(parts, resume, work_dir=tmp_path) == (9, tmp_path / "epoch_3.safetensors")
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1] if "→" in line] == ["epoch_3.safetensors"]
    parts.damage(tmp_path / "epoch_3.safetensors")
    assert began(parts, "auto", work_dir=tmp_path) == (6, tmp_path / "epoch_2.safetensors")


def test_of_files_of_one_state_the_best_is_the_last_choice(parts, tmp_path):
    saving(parts, tmp_path, max_epochs=1)
    os.link(tmp_path / "epoch_1.safetensors", tmp_path / "best_acc_epoch_1.safetensors")
    (tmp_path / "last_checkpoint").unlink()
    assert began(parts, tmp_path) == (3, tmp_path / "epoch_1.safetensors")


def test_a_directory_names_the_out_dir_of_its_checkpoints(parts, tmp_path):
    """A work dir whose hooks save elsewhere."""
    saving(parts, tmp_path / "out")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last_checkpoint").write_text("../out/epoch_3.safetensors")
    assert began(parts, tmp_path / "run", out_dir=tmp_path / "out")[0] == 9
    with pytest.raises(CheckpointDamagedError, match=r"'\.\./out/epoch_3\.safetensors'"):
        began(parts, tmp_path / "run")


@pytest.mark.parametrize(
    "kind", ["absolute", "../", "URL", "file URL", "FIFO", "link", "device", "a long text", "to a link", "to a FIFO"]
)
@pytest.mark.parametrize("resume", ["auto", "the directory"])
def test_a_last_checkpoint_outside_the_directory_is_reported_and_ignored(parts, tmp_path, monkeypatch, kind, resume, logs):
    work_dir = saving(parts, tmp_path / "run", max_epochs=2)
    elsewhere = saving(parts, tmp_path / "elsewhere") / "epoch_3.safetensors"
    pointer = work_dir / "last_checkpoint"
    pointer.unlink()
    if kind == "FIFO":
        os.mkfifo(pointer)
    elif kind in ("link", "device"):
        pointer.symlink_to("/dev/zero" if kind == "device" else elsewhere.parent / "last_checkpoint")
    else:
        (work_dir / "link.safetensors").symlink_to(elsewhere)
        os.mkfifo(work_dir / "fifo.safetensors")
        texts = {
            "absolute": str(elsewhere),
            "../": "../elsewhere/epoch_3.safetensors",
            "URL": "memory://elsewhere/epoch_3.safetensors",
        }
        texts |= {"file URL": elsewhere.as_uri(), "to a link": "link.safetensors", "to a FIFO": "fifo.safetensors"}
        pointer.write_text(texts.get(kind, "x" * 100_000))
    monkeypatch.setattr("fsspec.core.url_to_fs", None)
    seen = began(parts, "auto" if resume == "auto" else work_dir, work_dir=work_dir)
    assert seen == (6, work_dir / "epoch_2.safetensors")
    assert any(entry["log_level"] == "warning" for entry in logs)


def test_a_last_checkpoint_outside_the_directory_without_others_is_an_error(parts, tmp_path):
    elsewhere = saving(parts, tmp_path / "elsewhere") / "epoch_3.safetensors"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last_checkpoint").write_text(str(elsewhere))
    with pytest.raises(CheckpointDamagedError, match="resume="):
        began(parts, "auto", work_dir=tmp_path / "run")
    (tmp_path / "run" / "last_checkpoint").unlink()
    (tmp_path / "run" / "epoch_3.safetensors").symlink_to(elsewhere)
    with pytest.raises(CheckpointDamagedError, match=r"epoch_3\.safetensors"):
        began(parts, "auto", work_dir=tmp_path / "run")
    assert began(parts, tmp_path / "run" / "epoch_3.safetensors") == (9, tmp_path / "run" / "epoch_3.safetensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("progress", {"epoch": 10**5000}), ("progress", {"iter": -1}), ("progress", {"epoch": "1"}), ("progress", [1])),
        *(("format", "1"), ("format", None), ("bus", []), ("bus", {"hooks": {}, "publishes": {"x": "y"}}), ("state_dict", [])),
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(parts, tmp_path, key, value):
    state = load(saving(parts, tmp_path) / "epoch_1.safetensors")
    save({**state, key: value}, tmp_path / "odd.safetensors")
    loop = parts.loop(Bus(), val_data=None, max_epochs=3)
    before = [parameter.clone() for parameter in loop.model.parameters()]
    with pytest.raises(CheckpointError, match=key):
        loop.run(resume=tmp_path / "odd.safetensors")
    assert loop.counters.iter == 0
    assert all(map(torch.equal, before, loop.model.parameters()))


def test_a_run_resumes_without_the_keys_omitted_from_a_save(parts, bus, tmp_path):
    leave_out = ["data", "info", "stateful", "options"]
    bus.on("after_train_epoch", lambda e: e.run.checkpoints.save("some.safetensors", leave_out=leave_out))
    parts.loop(bus, work_dir=tmp_path, val_data=None, max_epochs=1).run()
    assert not set(leave_out) & load(tmp_path / "some.safetensors").keys()
    assert began(parts, tmp_path) == (3, tmp_path / "some.safetensors")


@pytest.mark.parametrize(
    ("name", "error", "value"),
    [
        ("fifo.safetensors", CheckpointDamagedError, "FIFO"),  # and no hang
        ("", CheckpointError, 'resume="auto"'),
        *(
            (f"x{suffix}", ConfigurationError, "`trainbus checkpoint import {} x.safetensors`")
            for suffix in (".pth", ".pt", ".ckpt")
        ),
    ],
)
def test_what_is_no_checkpoint_is_an_error_with_advice(parts, tmp_path, name, error, value):
    path = tmp_path / name
    if name.endswith(".safetensors"):
        os.mkfifo(path)
    elif name:
        torch.save({"state_dict": {}}, path)
    with pytest.raises(error, match=value.format(path)) as caught:
        began(parts, path)
    assert str(path) in str(caught.value)


def test_from_the_url_of_a_directory(parts, tmp_path):
    files = fsspec.filesystem("memory")
    for path in saving(parts, tmp_path).glob("*"):
        files.pipe_file(f"/resume-from/run/{path.name}", path.read_bytes())
    files.makedirs("/resume-from/empty", exist_ok=True)
    try:
        iterations, place = began(parts, "memory://resume-from/run/")
        assert (iterations, str(place)) == (9, "memory://resume-from/run/epoch_3.safetensors")
        files.rm_file("/resume-from/run/last_checkpoint")
        files.pipe_file("/resume-from/run/epoch_1.safetensors", (tmp_path / "epoch_1.safetensors").read_bytes())  # the latest
        assert began(parts, "memory://resume-from/run")[0] == 9
        files.pipe_file("/resume-from/run/epoch_3.safetensors", b"cut off")
        assert began(parts, "memory://resume-from/run")[0] == 6
        with pytest.raises(CheckpointError, match="memory://resume-from/empty"):
            began(parts, "memory://resume-from/empty")
    finally:
        files.rm("/resume-from", recursive=True)


@pytest.mark.parametrize("resume", ["run", "run/epoch_1.safetensors"])
def test_a_relative_path_is_one_from_the_directory_at_the_beginning(parts, bus, tmp_path, monkeypatch, resume):
    """Also where a hook changes the current directory."""
    saving(parts, tmp_path / "run", max_epochs=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    seen = []
    bus.on("before_run", lambda e: os.chdir(tmp_path / "elsewhere"))
    bus.on("before_train", lambda e: seen.append(e.run.checkpoints.resumed_from))
    parts.loop(bus, max_epochs=1).run(resume=resume)
    assert seen == [tmp_path / "run" / "epoch_1.safetensors"]


# ------------------------------------------------------------------------------------------------ what does not fit


def pair(width=3):
    return {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, width)}


def both(models):
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for name, model in models.items()}

    def step(models, batch):
        return torch.nn.functional.cross_entropy(models["second"](models["first"](batch[0])), batch[1])

    return {"model": models, "optimizer": optimizers, "step": step}


def test_several_models_and_optimizers_are_saved_by_name(parts, tmp_path):
    models, others = pair(), pair()
    saving(parts, tmp_path, **both(models))
    assert load(tmp_path / "epoch_1.safetensors")["state_dict"].keys() == {"first", "second"}
    assert began(parts, tmp_path / "epoch_1.safetensors", **both(others))[0] == 3
    for name, model in models.items():
        parts.assert_same(dict(others[name].state_dict()), dict(model.state_dict()))


def test_a_checkpoint_that_fits_one_of_two_models_or_has_other_names_changes_neither(parts, tmp_path):
    saving(parts, tmp_path, max_epochs=1, **both(pair()))
    models = pair(width=5)
    before = {name: parts.weights(model) for name, model in models.items()}
    with pytest.raises(CheckpointError, match=r"weight \(saved \(3, 4\), here \(5, 4\)\)"):
        began(parts, tmp_path / "epoch_1.safetensors", **both(models))
    parts.assert_same({name: dict(model.state_dict()) for name, model in models.items()}, before)
    other = saving(parts, tmp_path / "other", max_epochs=1) / "epoch_1.safetensors"
    with pytest.raises(CheckpointError, match="first"):
        began(parts, other, **both(models))


def test_a_checkpoint_of_another_model_lists_the_keys_and_leaves_the_model_as_it_was(parts, tmp_path):
    path = saving(parts, tmp_path, max_epochs=1) / "epoch_1.safetensors"
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    before = parts.weights(model)
    with pytest.raises(CheckpointError) as caught:
        began(parts, path, model=model)
    message = str(caught.value)
    assert "missing: 2.bias, 2.weight" in message
    assert "unexpected: 1.bias, 1.num_batches_tracked" in message
    assert "of another shape: 0.weight (saved (8, 4), here (16, 4))" in message
    parts.assert_same(dict(model.state_dict()), before)


def test_with_strict_false_load_weights_and_a_resumed_run_use_matching_keys(parts, bus, tmp_path):
    path = saving(parts, tmp_path, max_epochs=1) / "epoch_1.safetensors"
    saved = load(path)["state_dict"]["0.weight"]
    other = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 5))
    load_weights(other, load(path)["state_dict"], strict=False)
    assert torch.equal(other[0].weight, saved)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    seen = []
    bus.on("before_train", lambda e: seen.append(model[0].weight.detach().clone()))
    parts.loop(bus, model=model).run(resume=path, strict=False)
    assert torch.equal(seen[0], saved)


@pytest.mark.parametrize("saved_wrapped", [True, False])
def test_names_of_wrappers_do_not_matter(parts, tmp_path, saved_wrapped):
    wrapped, plain = torch.nn.DataParallel(parts.model(1)), parts.model(1)
    one, other = (wrapped, plain) if saved_wrapped else (plain, wrapped)
    path = saving(parts, tmp_path, model=one, max_epochs=1) / "epoch_1.safetensors"
    assert "0.weight" in load(path)["state_dict"]
    parts.loop(model=other, max_epochs=1).run(resume=path)
    parts.assert_same(list(other.state_dict().values()), list(one.state_dict().values()))


def test_after_load_checkpoint_can_change_the_applied_state(parts, tmp_path):
    path = saving(parts, tmp_path, max_epochs=1) / "epoch_1.safetensors"
    model, bus = parts.model(), Bus()
    bus.on("after_load_checkpoint", lambda e: e.checkpoint["state_dict"]["0.bias"].fill_(7.0))
    parts.loop(bus, model=model, max_epochs=1).run(resume=path)
    assert torch.equal(model[0].bias, torch.full((8,), 7.0))


OTHER_OPTIMIZERS = {
    "of another kind": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), "step|betas"),
    "with other groups": (
        lambda model: torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2:].parameters()}], lr=0.1),
        "parameter groups",
    ),
    "with fewer parameters": (lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), "size"),
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_a_checkpoint_of_another_optimizer_changes_nothing_or_with_strict_false_starts_it_without_state(
    parts, tmp_path, kind, logs
):
    saving(parts, tmp_path, max_epochs=1)
    make, says = OTHER_OPTIMIZERS[kind]
    model = parts.model(3)
    optimizer = make(model)
    loop = parts.loop(model=model, optimizer=optimizer, val_data=None)
    weights, state = parts.weights(model), optimizer.state_dict()
    with pytest.raises(CheckpointError, match=rf"another optimizer.*{says}.*strict=False"):
        loop.run(resume=tmp_path / "epoch_1.safetensors")
    parts.assert_same(dict(model.state_dict()), weights)
    parts.assert_same(optimizer.state_dict(), state)
    loop.run(resume=tmp_path / "epoch_1.safetensors", strict=False)
    assert loop.counters.iter == 6
    assert any("starts fresh" in entry["event"] for entry in logs)


@pytest.mark.parametrize("other", ["head", "optimizer"])
def test_gradients_of_a_window_are_those_of_the_same_head_and_of_an_optimizer_of_the_same_name(parts, tmp_path, other, logs):
    bus = Bus(Update(accumulate=3))
    bus.on("after_val_epoch", lambda e: e.run.checkpoints.save("window.safetensors"), when=lambda e: e.progress.iter == 2)
    parts.loop(bus, work_dir=tmp_path, train_data=parts.batches(4), max_iters=4, val_interval=2).run()
    path = tmp_path / "window.safetensors"
    assert load(path)["bus"]["hooks"]["training.update"]["window"]["count"] == 2
    model, bus, updates = parts.model(), Bus(Update(accumulate=3)), []
    if other == "head":
        model[-1] = torch.nn.Linear(8, 5)
    optimizers = {"other" if other == "optimizer" else "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    bus.on("after_optimizer_step", lambda e: updates.append(e.progress.iter))
    data = {"train_data": parts.batches(8), "val_data": None}
    loop = parts.loop(bus, model=model, optimizer=optimizers, max_iters=8, **data)
    loop.run(resume=path, strict=other == "optimizer")
    assert updates == [4, 7]  # the window begins again
    assert torch.isfinite(model[-1].weight).all()
    assert any("accumulation window" in entry["event"] for entry in logs)


@pytest.fixture
def saved(parts, bus, tmp_path):
    """A file after each of two epochs of three batches, and one within a validation."""
    bus.on("after_val_iter", lambda e: e.run.checkpoints.save("within.safetensors"), when=lambda e: e.progress.iter == 6)
    return saving(parts, tmp_path / "run", bus=bus, max_epochs=2, val_data=parts.batches(2))


def test_peek_returns_the_progress_in_a_file_of_which_it_reads_no_tensor(saved):
    progress = peek(saved / "epoch_1.safetensors")
    assert (progress.epoch, progress.iter, progress.update, progress.stage) == (1, 3, 3, "val")
    assert (progress.max_epochs, progress.max_iters) == (None, None)  # the limits are the next run's
    progress = peek(str(saved / "within.safetensors"))
    assert (progress.epoch, progress.iter, progress.stage, progress.batch_idx, progress.validation) == (2, 6, "val", 0, 1)
    path = saved / "epoch_2.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # the digest is wrong now, and the header as it was
    path.write_bytes(data)
    assert peek(path).iter == 6


def test_peek_at_a_directory_or_its_url_uses_the_newest_checkpoint(saved, logs):
    files = fsspec.filesystem("memory")
    try:
        for path in saved.glob("*"):
            files.pipe_file(f"/peek/run/{path.name}", path.read_bytes())
        assert peek("memory://peek/run/epoch_1.safetensors").iter == 3
        assert peek("memory://peek/run").iter == 6
    finally:
        files.rm("/peek", recursive=True)
    (saved / "within.safetensors").unlink()
    (saved / "last_checkpoint").unlink()
    assert peek(saved).iter == 6
    (saved / "epoch_2.safetensors").write_bytes(b"cut off")
    assert peek(saved).iter == 3
    assert logs[0]["path"] == str(saved / "epoch_2.safetensors")


def test_peek_at_another_file_is_an_error_naming_it(tmp_path):
    save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        peek(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        peek(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"none\.safetensors"):
        peek(tmp_path / "none.safetensors")
    (tmp_path / "weights.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointDamagedError):
        peek(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointDamagedError, match=str(tmp_path)):
        peek(tmp_path)


@pytest.mark.parametrize("name", ["old.pth", "old.safetensors"])
def test_a_file_of_torch_save_is_named_with_the_command_that_converts_it(tmp_path, name):
    torch.save({"state_dict": {}}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"`trainbus checkpoint import .* old.safetensors`") as told:
        peek(tmp_path / name)
    assert "damaged" not in str(told.value)


def test_a_run_resumes_bitwise_from_a_reimported_export(tmp_path, parts):
    data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.arange(12) % 3)

    def train(name: str, epochs: int, resume: Path | None = None) -> Any:
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        bus = Bus()
        bus.add(EMAHook(), CheckpointHook(interval=1))
        model = parts.model(dropout=0.3)
        loop = parts.loop(bus, model=model, train_data=loader, max_epochs=epochs, work_dir=tmp_path / name, seed=0)
        loop.run(resume=resume)
        return model.state_dict()

    whole = train("whole", 3)
    train("half", 2)
    export_tree(tmp_path / "half" / "epoch_2.safetensors", tmp_path / "half.pth")
    save(load_pth(tmp_path / "half.pth"), tmp_path / "back.safetensors")
    parts.assert_same(whole, train("rest", 3, tmp_path / "back.safetensors"))
