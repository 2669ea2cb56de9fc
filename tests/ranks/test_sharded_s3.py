"""FSDP2 and an S3 server: saved by 2 processes, resumed by 1, 3 and 4; an outage at the end of a run."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from trainbus.eventloop.checkpoint import load_whole

from .test_sharded import assert_restored, restored, trained
from .test_sharded_mirror import assert_same, on_disks, only

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

from ..s3 import BUCKET, S3Server  # noqa: E402 - moto may be missing

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def s3() -> Iterator[S3Server]:
    s3 = S3Server()
    yield s3
    s3.close()


@pytest.fixture
def server(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Gives the environment that leads to a server with a bucket."""
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {**keys, "AWS_ENDPOINT_URL": s3.url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(BUCKET)
    yield environment
    s3fs.S3FileSystem.clear_instance_cache()


def there(environment: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(environment)  # the processes are forked from one that knows no server
    return function(*args)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"staging": "overlap", "busy": "replace"}], ids=str)
def test_a_sharded_save_of_2_processes_in_s3_is_bitwise_the_same_on_1_3_and_4(server, ranks, tmp_path, options):
    ranks(there, server, trained, URL, options)
    store = s3fs.S3FileSystem()
    tree = load_whole(f"{URL}/epoch_2.safetensors")
    (directory,) = (name for name in store.ls(URL) if name.endswith(".shards"))  # those of the first epoch are gone
    assert sorted(name.rpartition("/")[2] for name in store.ls(directory)) == [
        "__0.safetensors",
        "__1.safetensors",
        "index.safetensors",
    ]
    for size in (1, 3, 4):
        for found in ranks(there, server, restored, str(tmp_path), URL, size > 1, size=size):
            assert_restored(found, tree)


@pytest.mark.long
def test_what_two_disks_keep_when_s3_is_out_is_uploaded_once_it_answers_by_other_ranks(server, s3, ranks, tmp_path):
    def run(*disks: str, epochs: int, refuses: str = "") -> Any:
        s3.fault = lambda method, path: "403 Forbidden" if method in ("PUT", "POST") and refuses and refuses in path else None
        options = {"epochs": epochs, "out_dir": f"s3://{BUCKET}"}
        return ranks(there, server, on_disks, tmp_path, disks, options, size=len(disks))

    before, _ = run("a", "b", epochs=2, refuses="epoch_2")
    assert "kept as" in before.error
    for one in run("b", "a", epochs=3, refuses="epoch_2.safetensors"):  # the parts arrive, and the file does not
        assert one.began is None
        assert f"rank 1 has {tmp_path}/a/run/epoch_2.safetensors" in one.error
    for one in run("b", "new", "a", epochs=3):
        assert_same(one.began, before.ended)
        assert one.told == [("uploaded", "epoch_2"), ("uploaded", "epoch_3")]
    assert only(3, tmp_path / "a", tmp_path / "b")
    sent = load_whole(f"{URL}/epoch_2.safetensors")["state_dict"]
    assert all(torch.equal(sent[key], value) for key, value in before.ended[1].items())
