"""Ray's storage path is in a store: saves go there, and Ray's users find them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainbus.eventloop.checkpoint import load_whole, verify

pytest.importorskip("ray")
pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

from pyarrow.fs import FSSpecHandler, PyFileSystem, S3FileSystem  # noqa: E402 - it may be missing
from ray.train import CheckpointConfig  # noqa: E402

from ...s3 import BUCKET, S3Server  # noqa: E402
from .test_ray_train import EPOCHS, ITERATIONS, lines, undisturbed  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("default")  # Ray has many of its own

RUN = f"{BUCKET}/runs/x"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(BUCKET)
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


@pytest.fixture
def fit_in_store(fit: Callable[..., Any], s3: S3Server, tmp_path: Path) -> Callable[..., Any]:
    """Train with Ray's own file system for S3, and the environment that leads fsspec there."""
    store = S3FileSystem(**{f"{name}_key": "x" for name in ("access", "secret")}, scheme="http", endpoint_override=s3.url[7:])
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment["TMPDIR"] = str(tmp_path)  # where files wait
    return lambda *arguments, **options: fit(*arguments, **{"store": store, "environment": environment, **options})


def names() -> set[str]:
    store = s3fs.S3FileSystem()
    store.invalidate_cache()
    found = {path.rpartition("/")[2] for path in store.ls(RUN)}
    return {name for name in found if name.startswith(("iter_", "checkpoint_iter_"))}


def weights(checkpoint: Any) -> list[torch.Tensor]:
    with checkpoint.as_directory() as folder:
        (file,) = (path for path in Path(folder).iterdir() if path.is_file())
        verify(file)
        return list(load_whole(file)["state_dict"].values())


def test_a_killed_worker_goes_on_from_the_store_and_ray_has_all_checkpoints(fit_in_store, tmp_path, undisturbed):  # noqa: F811
    result = fit_in_store(kill_at=[1, 17])
    assert lines(tmp_path, "begins") == [0, 15]
    assert lines(tmp_path, "known")[0] is None
    assert result.metrics["iter"] == ITERATIONS
    told = [metrics["iter"] for _, metrics in result.best_checkpoints]
    assert told == [5, 10, 15, 20, 25, 30]
    assert all(torch.equal(*pair) for pair in zip(weights(result.checkpoint), undisturbed, strict=True))
    # Beside its folder, which Ray keeps, only the newest file is there.
    assert names() == {f"checkpoint_iter_{done}" for done in told} | {f"iter_{ITERATIONS}.safetensors"}


def test_num_to_keep_decides_which_saves_stay(fit_in_store, tmp_path):
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="error", checkpoint_score_order="min")
    result = fit_in_store(keep=keep, seconds=0.1)
    errors = dict(zip(lines(tmp_path, "iterations"), lines(tmp_path, "validated"), strict=True))
    _, score = result.best_checkpoints[-1]
    assert score["error"] == pytest.approx(min(errors.values()))
    kept = {Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints} | {f"checkpoint_iter_{ITERATIONS}"}
    assert names() == kept | {f"iter_{ITERATIONS}.safetensors"}


def test_a_save_that_ray_forgot_is_told_again_with_its_metrics(fit_in_store, tmp_path):
    first = fit_in_store(epochs=1)
    s3fs.S3FileSystem().rm(f"{RUN}/checkpoint_manager_snapshot.json")
    result = fit_in_store(epochs=2)
    assert lines(tmp_path, "begins") == [0, 10]
    assert [metrics["iter"] for _, metrics in result.best_checkpoints] == [5, 10, 15, 20]
    assert result.best_checkpoints[1][1] == first.metrics


def test_if_the_newest_file_is_damaged_a_copy_of_ray_is_resumed_from(fit_in_store, tmp_path):
    fit_in_store(epochs=1)
    store = s3fs.S3FileSystem()
    data = bytearray(store.cat_file(f"{RUN}/iter_10.safetensors"))
    data[-100] ^= 1
    store.pipe_file(f"{RUN}/iter_10.safetensors", bytes(data))
    fit_in_store(epochs=2)
    assert lines(tmp_path, "begins") == [0, 10]


def test_sharded_saves_are_whole_in_the_folders_of_ray(fit_in_store, tmp_path):
    result = fit_in_store(epochs=2, kill_at=[0, 13], shard=True)
    assert lines(tmp_path, "begins") == [0, 10]
    assert weights(result.checkpoint)
    newest, parts = sorted(name for name in names() if name.startswith("iter_"))[::-1]
    assert (newest, parts[-7:]) == ("iter_20.safetensors", ".shards")
    whole = load_whole(f"s3://{RUN}/{newest}")["state_dict"]
    assert all(torch.equal(*pair) for pair in zip(weights(result.checkpoint), whole.values(), strict=True))


def test_a_bucket_that_refuses_copies_gets_the_folder_by_a_second_upload(fit_in_store, s3):
    refused = []
    s3.fault = lambda method, path: refused.append(path) or "403 Forbidden" if method == "COPY" else None
    result = fit_in_store(epochs=1)
    assert weights(result.checkpoint)
    assert refused


def test_a_store_of_fsspec_needs_no_environment(fit, s3, tmp_path):
    inner = s3fs.S3FileSystem(**dict.fromkeys(("key", "secret"), "x"), endpoint_url=s3.url)
    result = fit(store=PyFileSystem(FSSpecHandler(inner)), epochs=1)
    assert result.error is None
    assert weights(result.checkpoint)


def test_a_store_that_the_environment_does_not_lead_to_is_an_error(fit_in_store):
    with pytest.raises(Exception, match="does not find it there"):
        fit_in_store(environment={"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}, epochs=1, failures=0)
