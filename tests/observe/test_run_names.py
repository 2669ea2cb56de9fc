"""Events that leave the process name their run."""

import torch

from trainbus.eventloop import Bus, Run, from_json, from_msgpack
from trainbus.eventloop.events import CostsMeasured

from ..waiting import on_threads


def test_encoded_events_name_their_run(tmp_path):
    heard, told = {}, ("after_train_iter", "checkpoint_committed", "costs_measured", "after_run")

    def train(name: str) -> None:
        bus = Bus(timing=True)
        for mount_point in told:
            bus.on(mount_point, lambda event: heard.setdefault(name, []).append(event.to_json()), offload="thread")
        model = torch.nn.Linear(1, 1)
        with Run(bus, model=model, optimizer=torch.optim.SGD(model.parameters()), name=name, work_dir=tmp_path / name) as run:
            for _ in run.epochs(1):
                for _ in run.train([0]):
                    run.checkpoints.save()
            bus.publish(CostsMeasured(progress=bus.internal.progress, costs=bus.costs()))

    on_threads(train, "one", "other")
    for name, encoded in heard.items():
        events = [from_json(one) for one in encoded]
        assert {event.mount_point for event in events} == set(told)
        assert {event.progress.run_name for event in events} == {name}
        assert {from_msgpack(event.to_msgpack()).progress.run_name for event in events} == {name}
    assert heard.keys() == {"one", "other"}
