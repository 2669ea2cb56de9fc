"""The program ends while a daemon thread trains."""

SCRIPT = """
import sys, threading, time, torch
from trainbus.eventloop import Bus, Run, TrainLoop

class Parts:
    def __init__(self):
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = [torch.randn(4, 8)] * 10
        self.bus, self.began = Bus(), threading.Event()
        self.bus.on("after_train_iter", self.ship)

    async def ship(self, event):
        self.began.set()

def step(model, batch):
    time.sleep(0.001)
    return model(batch).mean()

def own(parts):
    with Run(parts.bus, model=parts.model, optimizer=parts.optimizer, name="own") as run:
        for epoch in run.epochs(10_000):
            for batch in run.train(parts.data):
                step(parts.model, batch).backward()
                parts.optimizer.step()

def loop(parts):
    options = {"train_data": parts.data, "bus": parts.bus, "max_epochs": 10_000, "name": "loop"}
    TrainLoop(parts.model, parts.optimizer, step=step, **options).run()

both = Parts(), Parts()
for train, parts in zip((own, loop), both):
    threading.Thread(target=train, args=(parts,), daemon=True).start()
for parts in both:
    assert parts.began.wait(60)
sys.exit(3)
"""


def test_each_run_of_a_daemon_thread_is_stopped_with_one_line_and_the_program_has_its_status(script):
    done = script(SCRIPT)
    assert done.returncode == 3, done
    lines = sorted(line for line in done.stderr.splitlines() if line)
    assert len(lines) == 2, lines
    assert all("daemon thread" in line for line in lines)
    assert "Traceback" not in done.stderr
