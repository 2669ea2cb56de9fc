"""What a run may be told to go on from: directories, here and elsewhere; and what does not fit its models or optimizers."""

from __future__ import annotations

import os

import fsspec
import pytest
import torch
from structlog.testing import capture_logs

from eventloop import Bus, CheckpointDamagedError, CheckpointError, ConfigurationError, Update
from eventloop.checkpoint import load, save
from eventloop.cli import main


def saving(parts, work_dir, resume=None, **options):
    """Three files, each an epoch further."""
    bus = Bus()
    bus.on("after_train_epoch", lambda e: e.run.request_save(f"epoch_{e.progress.epoch + 1}.safetensors"))
    parts.loop(bus, work_dir=work_dir, val_data=None, **{"max_epochs": 3} | options).run(resume=resume)
    return work_dir


def began(parts, resume, out_dir=None, **options):
    """Return how many iterations the run had when it went on, and from where."""
    bus, seen = Bus(), []
    if out_dir is not None:
        bus.on("before_run", lambda e: e.run.keeps_checkpoints_in(out_dir))
    bus.on("before_train", lambda e: seen.append((e.progress.iter, e.run.resumed_from)))
    parts.loop(bus, val_data=None, **{"max_epochs": 3} | options).run(resume=resume)
    return seen[0]


def test_from_a_directory_the_newest_good_checkpoint_in_it_is_taken(parts, tmp_path):
    saving(parts, tmp_path)
    assert began(parts, tmp_path) == (9, tmp_path / "epoch_3.safetensors")
    parts.damage(tmp_path / "epoch_3.safetensors")
    assert began(parts, str(tmp_path)) == (6, tmp_path / "epoch_2.safetensors")


def copied_backwards(directory):
    """Have the older files the newer times, as copies may."""
    for age, name in enumerate(sorted(path.name for path in directory.iterdir())):
        os.utime(directory / name, (2e9 - age, 2e9 - age))


def test_the_newest_checkpoint_of_a_copy_is_the_one_with_most_progress(parts, tmp_path):
    saving(parts, tmp_path)
    copied_backwards(tmp_path)
    parts.damage(tmp_path / "epoch_3.safetensors")
    assert began(parts, tmp_path) == (6, tmp_path / "epoch_2.safetensors")
    (tmp_path / "epoch_3.safetensors").unlink()
    (tmp_path / "last_checkpoint").unlink()
    assert began(parts, "auto", work_dir=tmp_path) == (6, tmp_path / "epoch_2.safetensors")


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
    with capture_logs():
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
    with capture_logs():
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
    with capture_logs(), pytest.raises(CheckpointDamagedError, match=r"'\.\./out/epoch_3\.safetensors'"):
        began(parts, tmp_path / "run")


@pytest.mark.parametrize(
    "kind", ["absolute", "../", "URL", "file URL", "FIFO", "link", "device", "a long text", "to a link", "to a FIFO"]
)
@pytest.mark.parametrize("resume", ["auto", "the directory"])
def test_a_last_checkpoint_outside_the_directory_is_reported_and_ignored(parts, tmp_path, monkeypatch, kind, resume):
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
    with capture_logs() as logs:
        seen = began(parts, "auto" if resume == "auto" else work_dir, work_dir=work_dir)
    assert seen == (6, work_dir / "epoch_2.safetensors")
    assert any(entry["log_level"] == "warning" for entry in logs)


def test_a_last_checkpoint_outside_the_directory_without_others_is_an_error(parts, tmp_path):
    elsewhere = saving(parts, tmp_path / "elsewhere") / "epoch_3.safetensors"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last_checkpoint").write_text(str(elsewhere))
    with capture_logs(), pytest.raises(CheckpointDamagedError, match="resume="):
        began(parts, "auto", work_dir=tmp_path / "run")
    (tmp_path / "run" / "last_checkpoint").unlink()
    (tmp_path / "run" / "epoch_3.safetensors").symlink_to(elsewhere)
    with capture_logs(), pytest.raises(CheckpointDamagedError, match=r"epoch_3\.safetensors"):
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


def test_a_run_resumes_without_the_keys_omitted_from_a_save(parts, tmp_path):
    bus = Bus()
    leave_out = ["data", "info", "stateful", "options"]
    bus.on("after_train_epoch", lambda e: e.run.request_save("some.safetensors", leave_out=leave_out))
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
def test_a_relative_path_is_one_from_the_directory_at_the_beginning(parts, tmp_path, monkeypatch, resume):
    """Also where a hook changes the current directory."""
    saving(parts, tmp_path / "run", max_epochs=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    bus, seen = Bus(), []
    bus.on("before_run", lambda e: os.chdir(tmp_path / "elsewhere"))
    bus.on("before_train", lambda e: seen.append(e.run.resumed_from))
    parts.loop(bus, max_epochs=1).run(resume=resume)
    assert seen == [tmp_path / "run" / "epoch_1.safetensors"]


# ------------------------------------------------------------------------------------------------ what does not fit


def pair(parts, width=3):
    return {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, width)}


def both(parts, models, **options):
    optimizer = torch.optim.SGD([p for model in models.values() for p in model.parameters()], lr=0.1)

    def step(models, batch):
        return torch.nn.functional.cross_entropy(models["second"](models["first"](batch[0])), batch[1])

    return {"model": models, "optimizer": optimizer, "step": step, **options}


def test_a_checkpoint_that_fits_one_of_two_models_changes_neither(parts, tmp_path):
    saving(parts, tmp_path, max_epochs=1, **both(parts, pair(parts)))
    models = pair(parts, width=5)
    before = {name: parts.weights(model) for name, model in models.items()}
    with pytest.raises(CheckpointError, match=r"weight \(saved \(3, 4\), here \(5, 4\)\)"):
        began(parts, tmp_path / "epoch_1.safetensors", **both(parts, models))
    parts.assert_same({name: dict(model.state_dict()) for name, model in models.items()}, before)


OTHER_OPTIMIZERS = {
    "of another kind": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), "step|betas"),
    "with other groups": (
        lambda model: torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1:].parameters()}], lr=0.1),
        "parameter groups",
    ),
    "with fewer parameters": (lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), "size"),
}


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_a_checkpoint_of_another_optimizer_is_an_error_and_changes_nothing(parts, tmp_path, kind):
    saving(parts, tmp_path, max_epochs=1)
    make, says = OTHER_OPTIMIZERS[kind]
    model = parts.model(3)
    optimizer = make(model)
    weights, state = parts.weights(model), optimizer.state_dict()
    with pytest.raises(CheckpointError, match=rf"another optimizer.*{says}.*strict=False"):
        began(parts, tmp_path / "epoch_1.safetensors", model=model, optimizer=optimizer)
    parts.assert_same(dict(model.state_dict()), weights)
    parts.assert_same(optimizer.state_dict(), state)


@pytest.mark.parametrize("kind", OTHER_OPTIMIZERS)
def test_with_strict_false_another_optimizer_starts_without_state(parts, tmp_path, kind, capfd):
    saving(parts, tmp_path, max_epochs=1)
    model = parts.model(3)
    loop = parts.loop(model=model, optimizer=OTHER_OPTIMIZERS[kind][0](model), val_data=None)
    loop.run(resume=tmp_path / "epoch_1.safetensors", strict=False)
    assert loop.counters.iter == 6
    assert "starts fresh" in "".join(capfd.readouterr())


def saved_in_a_window(parts, tmp_path):
    bus = Bus()
    bus.add(Update(accumulate=3))
    bus.on("after_val_epoch", lambda e: e.run.request_save("window.safetensors"), when=lambda e: e.progress.iter == 2)
    parts.loop(bus, work_dir=tmp_path, train_data=parts.batches(4), max_iters=4, val_interval=2).run()
    path = tmp_path / "window.safetensors"
    assert load(path)["bus"]["hooks"]["training.update"]["window"]["count"] == 2
    return path


def test_with_strict_false_another_head_restarts_the_accumulation_window(parts, tmp_path):
    path = saved_in_a_window(parts, tmp_path)
    model = parts.model()
    model[-1] = torch.nn.Linear(8, 5)
    bus = Bus()
    bus.add(Update(accumulate=3))
    updates = []
    bus.on("after_optimizer_step", lambda e: updates.append(e.progress.iter))
    loop = parts.loop(bus, model=model, train_data=parts.batches(8), val_data=None, max_iters=8)
    with capture_logs() as logs:
        loop.run(resume=path, strict=False)
    assert updates == [4, 7]
    assert torch.isfinite(model[-1].weight).all()
    assert any("accumulation window" in entry["event"] for entry in logs)


def test_gradients_of_a_window_are_those_of_an_optimizer_of_the_same_name(parts, tmp_path):
    path = saved_in_a_window(parts, tmp_path)
    model = parts.model()
    bus = Bus()
    bus.add(Update(accumulate=3))
    loop = parts.loop(
        bus,
        model=model,
        optimizer={"other": torch.optim.SGD(model.parameters(), lr=0.1)},
        train_data=parts.batches(8),
        val_data=None,
        max_iters=8,
    )
    with capture_logs() as logs:
        loop.run(resume=path)
    assert loop.counters.iter == 8
    assert any("accumulation window" in entry["event"] for entry in logs)
