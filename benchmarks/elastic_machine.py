"""One process of the training that ``elastic.py`` strikes, as on a machine of its own: its disk, its log, its exit status.

``torchrun … -m benchmarks.elastic_machine`` forks. The child runs ``elastic_job``; it cannot open the disks of the other
machines. The parent stays to log the exit status of the child, which ``torchrun`` does not tell. It imports nothing slow, so
its first line has the time at which ``torchrun`` started this process, which is the end of the rendezvous.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MACHINES = "ELASTIC_MACHINES"
"""The variable that names the directory with the machines' disks. A machine's current directory is its own."""
LOGS = "ELASTIC_LOGS"
"""The variable that names the directory of the logs, which is part of the experiment and of no machine."""
LISTING = ("open", "os.", "shutil.")


class Log:
    """Lines of JSON in a file of this process. Each is there as soon as it is written, also if the process is killed."""

    def __init__(self) -> None:
        self.machine = Path.cwd().name
        name = f"{os.environ[LOGS]}/{self.machine}-{os.getpid()}.jsonl"
        self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def tell(self, **line: Any) -> None:
        os.write(self._file, json.dumps({"at": time.time(), **line}).encode() + b"\n")


def close_other_disks(log: Log) -> None:
    """Make each access of this process to another machine's disk an error, and write it down."""
    machines, own = f"{os.environ[MACHINES]}{os.sep}", f"{Path.cwd()}{os.sep}"

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if not event.startswith(LISTING):
            return
        for path in arguments:
            if isinstance(path, str | bytes | os.PathLike):
                full = f"{os.path.abspath(os.fsdecode(path))}{os.sep}"  # noqa: PTH100 - resolve() would come here again
                if full.startswith(machines) and full != machines and not full.startswith(own):
                    log.tell(trespassed=full)
                    raise PermissionError(f"{full} is on another machine")

    sys.addaudithook(look)


def main() -> None:
    log = Log()
    log.tell(started=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals the group; the child decides
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.tell(exited=status)
        os._exit(status if status >= 0 else 128 - status)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    close_other_disks(log)
    try:
        importlib.import_module("benchmarks.elastic_job").train(log)
    except Exception as error:
        log.tell(failed=f"{type(error).__name__}: {error}"[:2000])
        traceback.print_exc()
        raise


if __name__ == "__main__":
    main()
