"""Where batches come from: loaders of every kind, and how batches reach the device."""

import copy
import inspect
import pickle
from collections import namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, random_split

from trainbus.eventloop import ConfigurationError, Run, SeededDataset, TrainingError, Update
from trainbus.eventloop.training.data import to_device

META = torch.device("meta")


class Unsized:
    """A loader that makes a new generator for every pass."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (batch for batch in self.batches)


class Sized(Unsized):
    def __len__(self):
        return len(self.batches)


class Rewinding(Unsized):
    """An iterator that begins anew when it is asked for an iterator, as those of some data pipelines do."""

    def __iter__(self):
        self.left = list(self.batches)
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize("kind", [list, tuple, Sized, Unsized, Rewinding])
@pytest.mark.parametrize(("options", "iterations"), [({"max_epochs": 2}, 6), ({"max_iters": 7}, 7)])
def test_any_iterable_of_batches_will_do(parts, bus, trace, kind, options, iterations):
    parts.loop(bus, train_data=kind(parts.batches(3)), val_data=kind(parts.batches(2)), **options).run()
    assert len(trace.of("after_train_iter")) == iterations
    assert trace.names[-1] == "after_run"


def test_a_generator_is_good_for_one_pass_and_then_an_error(parts, bus, trace):
    with pytest.raises(TrainingError, match="train_data"):
        parts.loop(bus, train_data=(b for b in parts.batches(3)), val_data=None, max_iters=5).run()
    assert len(trace.of("after_train_iter")) == 3


@pytest.mark.parametrize("empty", [[], Unsized([]), DataLoader([1, 2], batch_size=4, drop_last=True)])
def test_an_empty_loader_is_an_error_that_names_it(parts, bus, trace, empty):
    for name, method in (("train_data", "run"), ("val_data", "validate"), ("test_data", "test")):
        with pytest.raises(TrainingError, match=name):
            getattr(parts.loop(bus, **{name: empty}), method)()
        assert trace.names[-1] == "on_exception"


def test_a_loader_without_a_length_knows_its_last_batch_for_a_partial_window(parts, bus, trace):
    bus.add(Update(accumulate=2))
    parts.loop(bus, train_data=Unsized(parts.batches(3)), val_data=None, max_epochs=1).run()
    assert trace.of("after_run")[0].progress.update == 2


def test_a_loader_without_a_length_is_read_after_before_train_epoch_and_ahead_only_on_demand(parts, bus):
    class Noting(Unsized):
        def __iter__(self):
            read.append("iter")
            for index, batch in enumerate(self.batches):
                read.append(index)
                yield batch

    read, seen = [], []
    for name in ("before_train_epoch", "after_train_iter"):
        bus.on(name, lambda e: seen.append(list(read)))
    parts.loop(bus, train_data=Noting(parts.batches(3)), val_data=None, max_epochs=1).run()
    assert seen == [[], ["iter", 0], ["iter", 0, 1], ["iter", 0, 1, 2]]


def test_none_is_a_batch_like_any_other(parts, bus, trace):
    (batch,) = parts.batches(1)
    parts.loop(bus, step=lambda m, b: parts.step(m, batch), train_data=[None] * 3, val_data=None).run()
    assert len(trace.of("after_train_iter")) == 6


def test_the_length_of_an_iterable_dataset_is_not_trusted(parts, bus, trace):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.randn(4), 0), (torch.randn(4), 1), (torch.randn(4), 2)] * 2)

        def __len__(self):
            return 100

    seen = []
    bus.on("after_train_iter", lambda e: seen.append(e.run.data.last_batch))
    parts.loop(bus, train_data=DataLoader(Stream(), batch_size=3), val_data=None, max_epochs=1).run()
    assert seen == [False, True]


# ------------------------------------------------------------------------------------------------------------ devices

Pair = namedtuple("Pair", "inputs labels")  # noqa: PYI024 - what collate functions yield


class Tokens(dict):
    """A mapping that moves itself, as tokenizers' outputs do."""

    def to(self, device):
        return Tokens({key: value.to(device) for key, value in self.items()})


def test_nested_batches_are_moved_and_keep_their_types():
    tensor = torch.ones(2)
    batch = {"pair": Pair(tensor, [tensor, (tensor, 3)]), "graph": SimpleNamespace(to=tensor.to), "tokens": Tokens(ids=tensor)}
    batch |= {"view": MappingProxyType({"a": tensor}), "name": "x", "none": None, "number": 2.5}
    moved = to_device(batch, META)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].inputs.device == moved["pair"].labels[0].device == moved["pair"].labels[1][0].device == META
    assert isinstance(moved["pair"].labels, list)
    assert isinstance(moved["pair"].labels[1], tuple)
    assert moved["graph"].device == moved["tokens"]["ids"].device == moved["view"]["a"].device == META
    assert isinstance(moved["tokens"], Tokens)
    assert type(moved["view"]) is dict
    assert (moved["pair"].labels[1][1], moved["name"], moved["none"], moved["number"]) == (3, "x", None, 2.5)


def test_what_is_on_the_device_is_not_copied_but_a_list_may_be_changed_in_place():
    cpu = torch.device("cpu")
    data = [torch.ones(2), torch.zeros(2)]
    batch = to_device(data, cpu)
    assert batch[0] is data[0]
    batch[0] = batch[0] + 1
    assert torch.equal(data[0], torch.ones(2))
    assert to_device(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), cpu).batch_sizes.device == cpu


def test_device_moves_the_model_and_the_batches(parts, bus):
    devices, model = [], parts.model()
    bus.on("before_train_iter", lambda e: devices.append(e.batch[0].device))

    def step(model, batch):
        return model(batch[0].float()).sum() * 0 + torch.zeros((), device=batch[0].device)

    with pytest.raises(Exception, match="meta"):  # nothing can be read from it; far enough to see where things are
        parts.loop(bus, model=model, step=step, device="meta", sanity=0).run()
    assert next(model.parameters()).device == devices[0] == META
    for stage in ("validate", "test"):
        with Run(model=model, device="meta") as run:
            assert next(getattr(run, stage)(parts.batches(1)))[0].device == META


def test_without_device_a_model_is_not_moved_even_if_on_two_devices(parts, bus):
    model = torch.nn.ModuleDict({"here": parts.model(), "elsewhere": torch.nn.Linear(4, 4, device="meta")})
    with Run(bus, model=model):
        assert model["elsewhere"].weight.device == META
        assert model["here"][0].weight.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------ SeededDataset


class Random(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(4), index % 3


def test_a_seeded_dataset_depends_on_seed_epoch_and_index_only():
    """The seeds may be those of any run."""
    one, other = SeededDataset(Random(), seed=-1), SeededDataset(Random(), seed=-1)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first = [one[i][0] for i in range(4)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(10)
    assert all(torch.equal(other[i][0], first[i]) for i in reversed(range(4)))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(SeededDataset(Random(), seed=-2)[0][0], first[0])
    other.set_epoch(1)
    assert not torch.equal(other[0][0], first[0])
    for seed in (None, "1", True, 2**64):
        with pytest.raises(ConfigurationError, match=f"seed={seed!r}"):
            SeededDataset(Random(), seed=seed)


class Helpful(Random):
    """Has a collate helper, a state and a batched read."""

    classes = ("a", "b")

    def __init__(self):
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)

    def __getitems__(self, indices):
        raise AssertionError("it would not be seeded")

    def collate_fn(self, samples):
        return torch.stack([inputs for inputs, _ in samples])

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def pickled(data):
    return pickle.loads(pickle.dumps(data))  # noqa: S301 - its own


@pytest.mark.parametrize("made", [lambda data: data, copy.copy, copy.deepcopy, pickled])
def test_a_seeded_dataset_has_the_attributes_of_its_dataset(made):
    data = made(SeededDataset(Helpful()))
    assert data.classes == ("a", "b")
    (batch,) = DataLoader(data, batch_size=4, collate_fn=data.collate_fn)
    assert torch.equal(batch[0], SeededDataset(Random())[0][0])
    data.load_state_dict({"read": 9})
    assert data.state_dict() == {"read": 9} == {"read": data.dataset.read}
    with pytest.raises(AttributeError, match="nothing"):
        data.nothing  # noqa: B018
    assert not hasattr(SeededDataset(Random()), "state_dict")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_a_dataset_within_a_seeded_one_is_that_of_the_loader(workers):
    made = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = made(SeededDataset(Helpful()), batch_size=2, num_workers=workers)
    next(iter(loader))
    assert "'read': 2" in str(loader.state_dict())
    for name in ("state_dict", "load_state_dict"):
        inspect.getattr_static(loader.dataset, name)  # as isinstance() with a protocol does from Python 3.12 on


def passes(parts, bus, loader, **options):
    """How many different batches a training has seen."""
    seen = set()
    bus.on("before_train_iter", lambda e: seen.add(tuple(e.batch[0].flatten().tolist())))
    parts.loop(bus, train_data=loader, val_data=None, **options or {"max_epochs": 3}).run()
    return len(seen)


@pytest.mark.parametrize("options", [{"max_epochs": 3}, {"max_iters": 6}])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_every_pass_over_a_seeded_dataset_has_different_random_numbers(parts, bus, options, workers):
    assert passes(parts, bus, DataLoader(SeededDataset(Random()), batch_size=2, **workers), **options) == 6


class Doubled(Dataset):
    """A user's own wrapper, with a dataset under a name of its own."""

    __slots__ = ("mine",)

    def __init__(self, mine):
        self.mine = mine

    def __len__(self):
        return len(self.mine)

    def __getitem__(self, index):
        inputs, label = self.mine[index]
        return 2 * inputs, label


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda data: Subset(data, range(4)),
        lambda data: random_split(data, [4, 0])[0],
        lambda data: ConcatDataset([data]),
        lambda data: Doubled(data),
        lambda data: Subset(ConcatDataset([Doubled(Subset(data, [0, 1])), Subset(data, [2, 3])]), range(4)),
        copy.copy,
        copy.deepcopy,
    ],
    ids=["Subset", "random_split", "ConcatDataset", "own", "nested", "copied", "deep copy"],
)
@pytest.mark.parametrize("wrap_loader", [lambda loader: loader, Unsized], ids=["", "own loader"])
def test_a_nested_seeded_dataset_gets_the_epoch(parts, bus, wrapped, wrap_loader):
    assert passes(parts, bus, wrap_loader(DataLoader(wrapped(SeededDataset(Random())), batch_size=4))) == 3


class Compared(SeededDataset):
    """Equals all of its kind, and so has no hash."""

    def __eq__(self, other):
        return isinstance(other, Compared)


class Hashed(Compared):
    """Has a hash that needs an attribute."""

    def __hash__(self):
        return hash(self.seed)


class Counting:
    """A user's own base class, whose constructor looks at its arguments."""

    def __new__(cls, dataset):
        made = super().__new__(cls)
        made.length = len(dataset)
        return made


class Counted(SeededDataset, Counting):
    pass


@pytest.mark.parametrize("kind", [Compared, Hashed, Counted])
def test_every_subclass_of_a_seeded_dataset_gets_the_epoch(parts, bus, kind):
    kind(Random())  # equal to the next one, and gone
    assert passes(parts, bus, DataLoader(kind(Random()), batch_size=4)) == 3


def test_only_seeded_datasets_of_the_training_data_get_the_epoch(parts, bus):
    one, other, validation = (SeededDataset(Random()) for _ in range(3))
    before = validation[0][0]
    loader = DataLoader(StackDataset(one=one, other=other), batch_size=4)
    step = lambda model, batch: parts.step(model, batch["one"])  # noqa: E731
    parts.loop(bus, train_data=loader, val_data=DataLoader(validation, batch_size=4), step=step, val_step=parts.step).run()
    assert torch.equal(validation[0][0], before)
    assert not torch.equal(one[0][0], before)
    assert not torch.equal(other[0][0], before)
