import torch

from trainbus.eventloop.checkpoint import load


def test_it_learns_keeps_the_best_and_logs_every_iteration(example, tmp_path):
    loss = example("own_loop").train(tmp_path)
    assert loss < 0.01
    (best,) = tmp_path.glob("best_loss_epoch_*.safetensors")
    assert load(best)["progress"]["epoch"] >= 1
    assert len((tmp_path / "scalars.jsonl").read_text().splitlines()) >= 200


def test_it_resumes(example, tmp_path):
    train = example("own_loop").train
    train(tmp_path / "once", epochs=6)
    train(tmp_path / "twice", epochs=3)
    train(tmp_path / "twice", epochs=6, resume="auto")
    once, twice = (load(tmp_path / name / "epoch_6.safetensors")["state_dict"] for name in ("once", "twice"))
    assert all(torch.equal(once[key], twice[key]) for key in once)
