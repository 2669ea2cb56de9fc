"""Checkpoints in an S3 server: one upload each, complete under their names or not there."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import fsspec
import pytest
import torch

from trainbus.eventloop.checkpoint import RemotePath, as_path, commit_bytes, load, make_directory, save, stage, verify, write
from trainbus.eventloop.errors import CheckpointError

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

from ..s3 import BUCKET, S3Server  # noqa: E402 - moto may be missing

URL = f"s3://{BUCKET}/run/a.safetensors"
PARTS = 12
BYTES = PARTS * 8_000_000
"""Fewer bytes than so many parts of an upload hold, and more than one less hold."""


def tree(value: float, size: int = BYTES // 4) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((size,), value)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": server.url, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(BUCKET)
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


@pytest.mark.long
def test_a_checkpoint_is_uploaded_once_and_never_copied(server: S3Server) -> None:
    server.requests.clear()
    save(tree(1.0), URL)
    methods = [request.partition(" ")[0] for request in server.requests]
    assert methods == ["POST", *["PUT"] * PARTS, "POST", "HEAD"]  # begin, parts, end, compare sizes
    server.requests.clear()
    save(tree(1.0, 10), f"s3://{BUCKET}/run/small.safetensors")
    assert sum("PUT" in request for request in server.requests) == 1
    verify(URL)
    assert torch.equal(load(URL)["weight"], tree(1.0)["weight"])


def test_no_bucket_is_made(server: S3Server) -> None:
    """A client that may not list the bucket would try to make it, in another region perhaps (marin-community/marin#9213)."""
    server.requests.clear()
    refused = f"/{BUCKET}?"
    server.fault = lambda method, path: "403 Forbidden" if method in ("GET", "HEAD") and path.startswith(refused) else None
    make_directory(f"s3://{BUCKET}/run")
    save(tree(1.0, 10), URL)
    assert not [request for request in server.requests if request in (f"PUT /{BUCKET}", f"PUT /{BUCKET}/")]


@pytest.mark.long
def test_a_large_file_has_larger_parts_and_no_more_of_them_than_s3_takes(server: S3Server, monkeypatch) -> None:
    monkeypatch.setattr("trainbus.eventloop.checkpoint.remote._MOST_PARTS", 4)
    server.requests.clear()
    save(tree(1.0), URL)
    assert sum("partNumber" in request for request in server.requests) == 4
    verify(URL)


@pytest.mark.long
@pytest.mark.parametrize("at", ["uploads", "partNumber=1", f"partNumber={PARTS}", "POST /bucket/run/a.safetensors?uploadId"])
def test_an_upload_that_fails_anywhere_keeps_the_earlier_file_and_leaves_no_part_of_its_own(server: S3Server, at: str) -> None:
    save(tree(1.0, 10), URL)
    server.fault = lambda method, path: "403 Forbidden" if at in f"{method} {path}" and method != "DELETE" else None
    with pytest.raises(CheckpointError, match=URL):
        save(tree(2.0), URL)
    server.fault = lambda method, path: None
    assert load(URL)["weight"][0] == 1.0
    left = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=BUCKET)
    assert not left.get("Uploads")


@pytest.mark.long
def test_a_server_that_never_answers_is_given_up(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it stops to answer in the middle of an upload."""
    for name in ("_PATIENCE", "_SLOW"):
        monkeypatch.setattr(f"trainbus.eventloop.checkpoint.remote.{name}", 1 if name == "_PATIENCE" else 1 << 30)
    over = threading.Event()
    for silent in ("partNumber=3", "run/"):
        server.fault = lambda method, path, silent=silent: over.wait(60) and None if silent in path else None  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=URL) as caught:
            save(tree(1.0), URL)
        assert isinstance(caught.value.__cause__, TimeoutError)
    with pytest.raises(CheckpointError, match="last_checkpoint"):
        commit_bytes(f"s3://{BUCKET}/run/last_checkpoint", b"x")
    over.set()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["503 Slow Down", "500 Internal Server Error", "reset"])
def test_a_fault_that_passes_is_tried_again(server: S3Server, fault: str) -> None:
    faults = [fault]
    server.fault = lambda method, path: faults.pop() if faults and "partNumber=2" in path else None
    save(tree(1.0), URL)
    assert not faults
    verify(URL)


@pytest.mark.long
@pytest.mark.parametrize("size", [10, BYTES // 4])
def test_what_another_process_has_written_is_never_replaced(server: S3Server, size: int) -> None:
    path = as_path(URL)
    assert isinstance(path, RemotePath)
    assert path.can_create
    write(stage(tree(1.0, size)), path, create=True)
    with pytest.raises(CheckpointError, match=URL) as caught:
        write(stage(tree(2.0, size)), path, create=True)
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert load(URL)["weight"][0] == 1.0
    assert not s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")
    save(tree(2.0, size), path)
    assert load(URL)["weight"][0] == 2.0


@pytest.mark.long
@pytest.mark.parametrize("size", [10, BYTES // 4])
@pytest.mark.parametrize("create", [True, False])
def test_an_upload_whose_last_answer_is_lost_is_done(server: S3Server, size: int, create: bool) -> None:
    """The request is sent again, and the server says that there is such a file, or no such upload."""
    faults = ["lost"]

    def fault(method: str, path: str) -> str | None:
        last = "uploadId=" in path if method == "POST" else method == "PUT" and "partNumber" not in path
        return faults.pop() if last and faults else None

    server.fault = fault
    write(stage(tree(1.0, size)), URL, create=create)
    assert not faults
    verify(URL)


@pytest.mark.long
def test_a_server_without_conditional_writes_gets_the_file_nevertheless(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = s3fs.S3FileSystem._call_s3, []

    async def call(self: object, method: str, *arguments: object, **options: object) -> object:
        if "IfNoneMatch" in options:
            refused.append(method)
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        return await real(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", call)
    for size in (10, BYTES // 4):
        write(stage(tree(1.0, size)), URL, create=True)
        verify(URL)
    assert refused == ["put_object", "complete_multipart_upload"]


@pytest.mark.long
def test_obstore_as_the_file_system_writes_the_same_files(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("obstore.fsspec")
    save(tree(1.0), URL)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    client.register("s3")
    try:
        path = as_path(URL.replace("/a.", "/b."))
        assert isinstance(path, RemotePath)
        assert not path.can_create
        write(stage(tree(1.0)), path, create=True)
        commit_bytes(path.with_name("last_checkpoint"), b"b.safetensors")
        verify(path)
        server.fault = lambda method, path: "403 Forbidden" if "partNumber=3" in path else None
        with pytest.raises(CheckpointError, match=str(path)):
            save(tree(2.0), path)
        server.fault = lambda method, path: None
        assert load(path)["weight"][0] == 1.0
    finally:
        fsspec.register_implementation("s3", s3fs.S3FileSystem, clobber=True)
    files = s3fs.S3FileSystem()
    assert files.cat(f"{BUCKET}/run/b.safetensors") == files.cat(f"{BUCKET}/run/a.safetensors")
