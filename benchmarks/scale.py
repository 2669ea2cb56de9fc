"""``python -m benchmarks scale [--quick]``: what saves, agreements, resumes and reports cost at 8 to 4,096 ranks.

Two things are measured, both with the product's own code:

- messages between processes of a real gloo group, of as many ranks as the machine has room for;
- a real TCPStore with messages of as many ranks as the table has, put by a few threads, and rank 0's work with them.

The rest is computed from the algorithms: how many messages follow each other, times the seconds of one between two processes.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from benchmarks.harness import environment
from trainbus.eventloop.checkpoint import packed, sharded, stage
from trainbus.eventloop.training.coordinator import Requests
from trainbus.eventloop.training.distributed import collectives, rounds
from trainbus.eventloop.training.distributed.blocks import Blocks
from trainbus.eventloop.training.distributed.collectives import Collectives, Maximum
from trainbus.eventloop.training.distributed.mailbox import Mailbox
from trainbus.eventloop.training.distributed.ranks import own_group
from trainbus.eventloop.training.rng import get_rng_state
from trainbus.eventloop.training.saves.contents import as_tree
from trainbus.eventloop.training.saves.rank_states import RankStates
from trainbus.eventloop.training.schema import SavedData, SavedPosition, SavedRank, SavedStart
from trainbus.observe.exchange import Comparison, RankExchange, Report
from trainbus.observe.ranks import spent_here

SIZES = (8, 64, 512, 4096)
CLIENTS = 8  # threads that act for all ranks but 0
PARTS = [("loop", name, 0.01) for name in ("waiting for data", "forward", "backward", "optimizer")]
PARTS += [("hook", f"Hook{number}", 0.001) for number in range(10)]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds and ranks only, to check that everything runs")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args(arguments)
    groups = {size: in_group(size, 5 if options.quick else 20) for size in ((2, 4) if options.quick else (2, 4, 8, 16))}
    stores = {size: best(by_store, size, 1 if options.quick else 3) for size in ((8, 512) if options.quick else SIZES)}
    rows = [row for size in stores for row in table(size, groups[2], stores[size])]
    show(rows, groups)
    if options.out is not None:
        result = {"environment": environment(), "processes": groups, "store": stores, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1))


# ------------------------------------------------------------------------------------------------ processes with gloo


def in_group(size: int, count: int) -> dict[str, float]:
    """Return seconds by operation between ``size`` processes: the best of ``count``, on the rank that takes longest."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.scale"])
    store = distributed.TCPStore("localhost", 0, is_master=True)
    results = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(rank, size, store.port, count, results)) for rank in range(size)]
    for process in processes:
        process.start()
    figures: dict[str, float] = results.get()
    for process in processes:
        process.join()
    return figures


def _rank(rank: int, size: int, port: int, count: int, results: Any) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    distributed.init_process_group(
        "gloo", store=distributed.TCPStore("localhost", port, is_master=False), rank=rank, world_size=size
    )
    ranks = Collectives(own_group("control"))
    figures = {"join": time.perf_counter() - start}
    flags = torch.zeros(8, dtype=torch.int32)

    def agree(ring: int) -> float:
        collectives.RING = ring  # type: ignore[misc]
        start = time.perf_counter()
        begun = Maximum(ranks, flags)
        begin = time.perf_counter() - start
        for _ in begun.steps():
            pass
        return begin

    operations: dict[str, Callable[[], object]] = {
        "ring": lambda: agree(size),
        "doubling": lambda: agree(1),
        "merged": lambda: ranks.distinct(0),
    }
    for name, operation in operations.items():
        seconds: list[float] = []
        begins: list[Any] = []
        for _ in range(count + 1):  # the first one does not count
            distributed.barrier(ranks.group)
            start = time.perf_counter()
            begins.append(operation())
            seconds.append(time.perf_counter() - start)
        figures[name] = min(seconds[1:])
        if name == "ring":
            figures["begin"] = min(begins[1:])
    slowest = ranks.merged(figures, lambda one, two: {name: max(one[name], two[name]) for name in one})
    if rank == 0:
        results.put(slowest)
    distributed.barrier(ranks.group)
    distributed.destroy_process_group()


# -------------------------------------------------------------------------------------------------- ranks of one store


def best(function: Callable[[int], dict[str, float]], size: int, count: int) -> dict[str, float]:
    """Return the smallest figures of ``count`` calls, each in a process of its own, which can be rank 0 of ``size``."""
    found = []
    for _ in range(count):
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            found.append(pool.apply(function, (size,)))
    return {name: min(one[name] for one in found) for name in found[0]}


def by_store(size: int) -> dict[str, float]:
    """Return what reports, saves, and rounds of agreement in other libraries' trainers cost with ``size`` ranks."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend without messages

    store = distributed.TCPStore("localhost", 0, is_master=True)
    distributed.init_process_group("fake", store=store, rank=0, world_size=size)
    with ThreadPoolExecutor(CLIENTS) as clients:
        report, save = _report(Others(size, "costs/run", clients)), _save(Others(size, "saves/run/token", clients))
        return {**report, **save, **_mesh(size), **_round(Others(size, "rounds/run", clients))}


class Others:
    """All ranks but 0, played by a few threads with a connection each."""

    def __init__(self, size: int, name: str, clients: ThreadPoolExecutor) -> None:
        self.size, self.name, self._clients = size, name, clients
        self._mailboxes = [Mailbox(name) for _ in range(CLIENTS)]

    def act(self, act: Callable[[Mailbox, int], object], ranks: Sequence[int] = ()) -> float:
        """Act for each rank, or those of ``ranks``; return the seconds."""
        every = ranks or range(1, self.size)

        def some(first: int) -> None:
            for rank in every[first::CLIENTS]:
                act(self._mailboxes[first], rank)

        start = time.perf_counter()
        list(self._clients.map(some, range(CLIENTS)))
        return time.perf_counter() - start


def _report(others: Others) -> dict[str, float]:
    exchange: Any = SimpleNamespace(_comparison=Comparison(others.size), _trains=lambda: True)
    reader: Any = SimpleNamespace(_comparison=Comparison(others.size))
    mailbox = Mailbox(others.name)

    def report(number: int, rank: int) -> Report:
        return Report(number, spent_here(20 * number, [(group, name, number * s + rank * 1e-9) for group, name, s in PARTS]))

    for number in range(1, 5):  # the first ones compare nothing yet, or less
        puts = others.act(lambda own, rank, number=number: own.put(str(rank), report(number, rank)))  # type: ignore[misc]
        mailbox.put("0", report(number, 0))
        start, busy = time.perf_counter(), time.thread_time()
        compared = RankExchange._compare(exchange, mailbox)
        seconds, busy = time.perf_counter() - start, time.thread_time() - busy
    reads = others.act(lambda own, rank: RankExchange._read(reader, own))
    return {
        "report_bytes": len(msgspec.msgpack.encode(report(1, 1))),
        "result_bytes": len(msgspec.msgpack.encode(compared)),
        "puts": puts,
        "compare": seconds,
        "compare_busy": busy,
        "reads": reads,
        "period": exchange._comparison.period,
    }


def _round(others: Others) -> dict[str, float]:
    """Return what a round takes where rank 0's agent serves its block, and hears of the other blocks from their first ranks."""
    others.act(lambda mailbox, rank: mailbox.put(f"joined/{rank}"))
    own, watch, answer = Requests(), Mailbox(others.name), rounds._Answer((10, 0))
    of_size = Blocks(0, others.size)
    members, firsts = [*of_size.members][1:], [*of_size.firsts][1:]
    agent = rounds.Rounds(others.name, own, lambda: 10)

    def answers() -> None:
        while not watch.has("opened/0"):
            time.sleep(0.001)
        others.act(lambda mailbox, rank: mailbox.put(f"answer/0/{rank}", answer), members)
        if firsts:  # each of them has waited for its block as long as rank 0 has
            others.act(lambda mailbox, rank: mailbox.put(f"block/0/{rank}", answer), firsts)

    while not watch.has("ready"):
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as thread:
        answering = thread.submit(answers)
        own.stop = True
        start = time.perf_counter()
        agent.agree()
        seconds = time.perf_counter() - start
        answering.result()
    if not agent.agreed.stop:
        sys.exit(f"{others.size} ranks have not agreed")
    looks = others.act(lambda mailbox, rank: mailbox.has("result/0"), members + firsts)
    agent.close()
    return {"round": seconds, "looks": looks, "answer_bytes": len(msgspec.msgpack.encode(answer))}


# ------------------------------------------------------------------------------------------------------- random states


def of_rank() -> SavedRank:
    """Return what a checkpoint has of each rank in the middle of an epoch: the random states now, and at its beginning."""
    start = SavedStart(get_rng_state(), [None] * 4, workers=False)
    train = SavedPosition(generators=[None] * 4, used=1, passes=0, begun=True, length=None, start=start)
    return SavedRank(get_rng_state(), SavedData(train, []))


def _save(others: Others) -> dict[str, float]:
    """Return what a rank's training thread, and rank 0's writing thread, do with the random states at a save."""
    ranks: Any = SimpleNamespace(run="run", rank=0, size=others.size)
    take = RankStates(ranks, "token").put(of_rank())
    sender, number = RankStates(SimpleNamespace(run="other", rank=1, size=2), "token"), 20  # type: ignore[arg-type]
    start = time.perf_counter()
    for _ in range(number):
        sender.put(of_rank())
    put = (time.perf_counter() - start) / number
    state = packed(as_tree(of_rank()))
    others.act(lambda mailbox, rank: mailbox.put(f"1/{rank}", state))
    staged = stage({"ranks": []})
    assert take is not None
    start, busy = time.perf_counter(), time.thread_time()
    states = take(lambda: False)
    staged.put("ranks", states)
    seconds, busy = time.perf_counter() - start, time.thread_time() - busy
    if any(len(one) < len(state) / 2 for one in states):
        sys.exit("rank 0 has not found the random states of all ranks")
    return {"state_put": put, "state_bytes": len(state), "take": seconds, "take_busy": busy}


# ------------------------------------------------------------------------------------------------- a mesh of two dimensions


def _mesh(size: int) -> dict[str, float]:
    """Return what a save of 200 tensors on a mesh of ``size`` / 2 × 2 costs rank 0: its copies, and the index of all parts."""
    mesh = init_device_mesh("cpu", (size // 2, 2))
    local = torch.zeros(16, 16)
    state = {str(n): DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=False) for n in range(200)}
    found: dict[str, float] = {}
    keeps, group = sharded.ShardStage(), distributed.group.WORLD

    def share(rank: int, keys: Iterable[str]) -> sharded._Share:
        place, name = (16 * (rank // 2), 16 * (rank % 2)), sharded.shards.part_name(rank)
        pieces = [sharded.Piece(place, (16, 16), name, 1024 * number, 1024) for number in range(len(state))]
        return sharded._Share([*map(sharded._Written, keys, [0] * len(state), pieces)], {}, None)

    for which in ("first", "mesh"):  # later saves have the same parts
        for _ in range(3 if which == "mesh" else 1):
            start = time.perf_counter()
            _, parts = keeps.copy_parts(state, Path("mesh.safetensors"), "00000000", group)
            copied = time.perf_counter() - start
            same = sharded._Share(None, {}, None)
            shares = [pickle.dumps(share(rank, parts._own) if which == "first" else same) for rank in range(size)]
            start = time.perf_counter()
            parts._put_together([pickle.loads(one) for one in shares])  # noqa: S301 - as gather_object does
            layout = parts._layout
            layout.packed = layout.packed or sharded.shards.packed_index(layout.index)
            seconds = time.perf_counter() - start
            parts.release()
            found |= {f"{which}_copy": copied, f"{which}_index": seconds, f"{which}_bytes": len(shares[-1])}
    return found


# ------------------------------------------------------------------------------------------------------------ the table


def table(size: int, two: dict[str, float], store: dict[str, float]) -> list[dict[str, Any]]:
    """Return the rows for ``size`` ranks; ``two`` has the seconds of the operations between two."""
    deep = (size - 1).bit_length()
    message = two["merged"] / 4  # up and down, and each is a size and a content
    ring = size <= collectives.RING
    merged = {"messages": 4 * (size - 1), "bytes": 4 * (size - 1) * 60, "thread": 4 * deep * message}

    def row(what: str, messages: float, size_: float, thread: float, beside: float, how: str) -> dict[str, Any]:
        return {
            "what": what,
            "ranks": size,
            "messages": messages,
            "bytes": size_,
            "thread": thread,
            "beside": beside,
            "how": how,
        }

    save = 2 * deep * message + store["state_put"]  # rank 0's decision, and what each rank puts
    # Beside the training, three rings of all_reduce, and one that tells rank 0 the lengths of what it gathers.
    parts = (6 * (size - 1) + (3 * 2 + 2) * size, size * store["state_bytes"] + merged["bytes"])
    # A ring passes each of 8 values around twice. With doubling each rank sends 8 values of 4 bytes once per step.
    agreement = (16 * (size - 1), 64 * (size - 1)) if ring else (size * deep, 32 * size * deep)
    waits = (two["begin"], (size - 1) * two["ring"]) if ring else (deep * two["doubling"], 0.0)
    reports = (size - 1) * (store["report_bytes"] + store["result_bytes"])
    return [
        row("agreement", *agreement, *waits, "computed"),
        row("stop", merged["messages"], merged["bytes"], merged["thread"], 0.0, "computed"),
        row("save", 4 * (size - 1), size * store["state_bytes"], save, store["take"], "computed"),
        row("sharded", *parts, save + merged["thread"], store["take"] + 3.5 * (size - 1) * two["ring"], "computed"),
        *(
            row(name, size - 1, size * store[f"{of}_bytes"], store[f"{of}_copy"], store[f"{of}_index"], "measured")
            for name, of in (("mesh, first save", "first"), ("mesh", "mesh"))
        ),
        row("resume", 2 * merged["messages"], 2 * merged["bytes"], 2 * merged["thread"], 0.0, "computed"),
        row("report", 4 * size, reports, 0.0, store["puts"] + store["compare"] + store["reads"], "measured"),
        row("round", 4 * size, size * (2 * store["answer_bytes"]), store["round"], store["looks"], "measured"),
    ]


def show(rows: list[dict[str, Any]], groups: dict[int, dict[str, float]]) -> None:
    console = Console()
    grid = Table(title="what ranks exchange", title_justify="left")
    for heading in ("", "ranks", "messages", "kB", "training thread ms", "beside it ms", ""):
        grid.add_column(heading, justify="left" if heading == "" else "right")
    for one in sorted(rows, key=lambda row: row["what"]):
        times = (f"{one[name] * 1e3:,.2f}" for name in ("thread", "beside"))
        grid.add_row(
            one["what"], str(one["ranks"]), f"{one['messages']:,.0f}", f"{one['bytes'] / 1e3:,.1f}", *times, one["how"]
        )
    console.print(grid)
    measured = Table(title=f"measured between processes on {os.cpu_count()} cores, ms", title_justify="left")
    names = [*groups[2]]
    for heading in ("processes", *names):
        measured.add_column(heading, justify="right")
    for size, figures in groups.items():
        measured.add_row(str(size), *(f"{figures[name] * 1e3:,.2f}" for name in names))
    console.print(measured)
