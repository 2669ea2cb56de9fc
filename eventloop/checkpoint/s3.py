"""Upload to S3 in parts, several at a time, by the requests of s3fs; its own files send one part after another.

s3fs tries each request again, after throttling, errors of the server and broken connections, for half a minute or so.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from trainbus.eventloop.checkpoint.commit import discard, note_step

PART: Final = 8 << 20
"""Bytes per part; more for files with more than ``_MOST_PARTS`` of them."""
AT_ONCE: Final = 8
"""Parts under way at a time."""
_MOST_PARTS: Final = 10_000
_PATIENCE: Final = 120
"""Seconds after which a request is given up: for a server that never answers s3fs alone would wait for six minutes."""
_PATIENCE_AFTER_ERROR: Final = 10


def upload(fs: Any, url: str, size: int, parts: Iterable[memoryview | bytes], *, create: bool = False) -> None:
    """Create or replace an object of ``size`` bytes; it appears when all of it is there. A failed upload leaves no parts.

    Raises:
        FileExistsError: ``create``, and there is an object of this name.
    """
    bucket, key, _ = fs.split_path(url)
    where = {"Bucket": bucket, "Key": key, "timeout": _PATIENCE}

    def finish(method: str, **what: Any) -> None:
        try:
            fs.call_s3(method, **where, **what, **({"IfNoneMatch": "*"} if create else {}))
        except OSError as error:
            if not create or error.errno != errno.ENOSYS:
                raise
            fs.call_s3(method, **where, **what)  # a server without conditional writes

    if size <= PART:
        finish("put_object", Body=b"".join(parts))
        return
    where["UploadId"] = fs.call_s3("create_multipart_upload", **where)["UploadId"]

    def send(number: int, block: bytes) -> dict[str, Any]:
        sent = fs.call_s3("upload_part", **where, PartNumber=number, Body=block)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    try:
        sent = _sent(send, _blocks(parts, max(PART, -(-size // _MOST_PARTS))))
        finish("complete_multipart_upload", MultipartUpload={"Parts": sent})
    except BaseException as error:
        where["timeout"] = _PATIENCE_AFTER_ERROR
        discard(url, lambda _: fs.call_s3("abort_multipart_upload", **where), error)
        raise


def _blocks(parts: Iterable[memoryview | bytes], size: int) -> Iterator[bytes]:
    """Yield the bytes of all parts in blocks of ``size``; copies, because botocore takes no memoryview."""
    views: list[memoryview] = []
    room = size
    for part in parts:
        rest = memoryview(part)
        while rest:
            views.append(rest[:room])
            rest, room = rest[room:], room - len(views[-1])
            if not room:
                yield b"".join(views)
                views, room = [], size
    if views:
        yield b"".join(views)


def _sent(send: Callable[[int, bytes], dict[str, Any]], blocks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Send numbered blocks, so many at a time; return the answers in order."""
    answers: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
    found: list[dict[str, Any] | BaseException] = []
    started = 0

    def answer(number: int, block: bytes) -> None:
        try:
            answers.put(send(number, block))
            note_step()
        except BaseException as error:  # noqa: BLE001 - raised below
            answers.put(error)

    try:
        for block in blocks:
            if started - len(found) == AT_ONCE:
                found.append(answers.get())
                if isinstance(found[-1], BaseException):
                    break
            started += 1
            # A daemon, for which an interpreter that exits does not wait.
            thread = threading.Thread(target=answer, args=(started, block), name="trainbus-part", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                answer(started, block)
    finally:
        while len(found) < started:  # also after an error: else a part could come after the upload was aborted
            found.append(answers.get())
    sent: list[dict[str, Any]] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        sent.append(one)
    return sorted(sent, key=lambda part: part["PartNumber"])
