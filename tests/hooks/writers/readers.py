"""Reads what writers keep, with the tools that they write for."""

import csv
import json
import struct
import time
import zlib
from pathlib import Path


def text(work_dir, name):
    """The values of a name in a table or in lines of JSON, with their steps."""
    if (work_dir / "scalars.csv").exists():
        rows = csv.DictReader((work_dir / "scalars.csv").read_text().splitlines())
        return [(int(row["step"]), float(row[name])) for row in rows if row[name]]
    lines = map(json.loads, (work_dir / "scalars.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def scalars(found, tag):
    """Those in an EventAccumulator of TensorBoard."""
    return [(event.step, event.value) for event in found.Scalars(tag)]


def runs(client):
    """The runs in a store of MLflow."""
    return client.search_runs([one.experiment_id for one in client.search_experiments()])


def history(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


# ------------------------------------------------------------------------------------------------------------------ W&B


def records(path):
    """Read a .wandb file with W&B's own messages, up to the end of its run, which W&B's process writes in its own time."""
    while True:
        found = whole(path.read_bytes())
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.02)


def whole(data):
    """The messages in a file framed as LevelDB's log is: blocks of 32 KiB; checksum, length, kind, data."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data[:4] == b":W&B"
    offset, message, found = 7, b"", []
    while offset < len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        if len(data) < offset + 7:
            break
        checksum, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        part = data[offset + 7 : offset + 7 + length]
        if len(part) < length:
            break
        assert checksum == zlib.crc32(part, zlib.crc32(bytes([kind])))
        message, offset = message + part, offset + 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(message))
            message = b""
    return found


def files(work_dir):
    return sorted(Path(work_dir).glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def rows(path):
    """The history: one mapping of names to values for each step."""
    kept = [record.history for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{("/".join(item.nested_key) or item.key): json.loads(item.value_json) for item in history.item} for history in kept]


def column(found, name):
    return [(row["_step"], row[name]) for row in found if name in row]


def exits(path):
    return [record.exit.exit_code for record in records(path) if record.WhichOneof("record_type") == "exit"]
