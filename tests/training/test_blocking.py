"""A training that blocks the event loop of a program is told, once."""

import pytest

JOB = """
import asyncio, sys, anyio, torch
from trainbus.eventloop import TrainLoop

def make_loop():
    model = torch.nn.Linear(1, 1)
    batch = torch.ones(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lambda model, batch: model(batch).mean()
    return TrainLoop(model, optimizer, step=step, train_data=[batch], val_data=[batch], max_epochs=1)

async def blocks():
    make_loop().run()
    make_loop().validate()

async def does_not():
    await make_loop().arun()
    await anyio.to_thread.run_sync(make_loop().run)
"""


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("make_loop().run()", 0),
        ("anyio.run(does_not)", 0),
        ("anyio.run(does_not, backend='trio')", 0),
        ("anyio.run(blocks)", 1),
        ("anyio.run(blocks, backend='trio')", 1),
        ("asyncio.run(blocks()); asyncio.run(blocks())", 1),
    ],
)
def test_a_run_in_async_code_says_once_that_it_blocks_the_event_loop(program, told, script):
    done = script(JOB + program)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("await loop.arun()") == told
