"""Measure what one save adds to the training of a language model on an accelerator: 20 iterations, the first after the save.

The model is a GPT of 124 million parameters, trained in bfloat16 by AdamW; a save is its weights and the optimizer's state,
1.5 GB. The clock starts before the save and stops when the device has done all iterations. The files are written beside them,
and waited for after the clock has stopped, but for ``torch.save``, which has no other way. A foreach copy of the same tensors
into pinned memory, on the stream of the training, is shown beside them. Each contender's first file is loaded: it must hold
the weights from before the next step.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import SUBJECT, Comparison, Settings, measure
from benchmarks.peers import load
from benchmarks.saving import FOREACH, remove
from trainbus.eventloop import device as door
from trainbus.eventloop.checkpoint import AsyncSaver
from trainbus.eventloop.checkpoint import load as load_file

NO_SAVE, TORCH = "no save", "torch.save"
WORDS, LENGTH, BATCH = 50_304, 512, 8
TOKENS = "tokens.weight"

Save = Callable[[dict[str, Any], Path], object]
_numbers = count(1)


class Gpt(nn.Module):
    """The sizes of GPT-2."""

    def __init__(self, layers: int = 12, width: int = 768, words: int = WORDS) -> None:
        super().__init__()
        self.words = words
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next tokens; ``text`` is (batch, length)."""
        hidden = self.tokens(text) + self.places.weight[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.blocks(hidden, mask=mask, is_causal=True) @ self.tokens.weight.t()


class Training:
    """The model, its optimizer, and iterations on random text."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.device, self.iterations = device, settings.rounds(2, 20)
        self.model = (Gpt(2, 64, 100) if settings.quick else Gpt()).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.text = torch.randint(self.model.words, (2 if settings.quick else BATCH, LENGTH + 1), device=device)
        self.step()  # the optimizer gets its state

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(self.text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.text[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def run(self, save: Callable[[], object]) -> float:
        """Save, train, and return the seconds until the device has done both."""
        door.synchronize(self.device)
        start = time.perf_counter()
        save()
        for _ in range(self.iterations):
            self.step()
        door.synchronize(self.device)
        return time.perf_counter() - start


class Saving:
    """Iterations behind a save; ``way`` saves, ``settle`` waits for the file, and ``read`` loads the model's weights."""

    def __init__(self, training: Training, directory: Path, way: Save, settle: Callable[[], object], read: Any) -> None:
        self.training, self.directory, self.way, self.settle, self.read = training, directory, way, settle, read
        self.checked = False

    def __call__(self) -> float:
        path = self.directory / f"save_{next(_numbers)}"
        before = None if self.checked else self.training.model.state_dict()[TOKENS].cpu()
        seconds = self.training.run(lambda: self.way(self.training.state(), path))
        self.settle()
        if before is not None and not torch.equal(self.read(path), before):
            raise RuntimeError(f"{path} does not hold the weights of the moment of the save")
        self.checked = True
        remove(path)
        return seconds


def saves(settings: Settings, directory: Path, device: torch.device) -> Comparison:
    training = Training(settings, device)
    with ExitStack() as scopes:
        make = partial(Saving, training, directory)
        contenders: dict[str, Callable[[], float]] = {
            NO_SAVE: lambda: training.run(lambda: None),
            FOREACH: partial(training.run, foreach_copy(training)),
        }
        for name, overlap in ((SUBJECT, [training.optimizer]), (f"{SUBJECT}, block", [])):
            saver = scopes.enter_context(closing(AsyncSaver(overlap=overlap)))
            contenders[name] = make(saver.save, saver.wait, lambda path: load_file(path)["model"][TOKENS])
        contenders[TORCH] = make(torch.save, lambda: None, lambda path: torch.load(path, "cpu")["model"][TOKENS])
        peers, left_out = load(("distributed",))
        for module in peers.values():
            for name, pinned in (("DCP async", False), ("DCP async, pinned", True)):
                try:
                    way = scopes.enter_context(module.of_training(pinned, training.optimizer))
                except OSError as error:
                    left_out[name] = str(error)
                else:
                    contenders[name] = make(*way, partial(module.weights_of, TOKENS))
        samples = measure(contenders, settings.rounds(quick=1, full=9), settings.tick)
    title = f"Added to {training.iterations} iterations of a language model by a save: {megabytes(training):,.0f} MB"
    return Comparison(title, "ms", TORCH, samples, NO_SAVE, left_out=left_out)


def megabytes(training: Training) -> float:
    return sum(tensor.nbytes for tensor in tensors(training)) / 1e6


def tensors(training: Training) -> list[Tensor]:
    weights = [parameter.detach() for parameter in training.model.parameters()]
    return weights + [value for state in training.optimizer.state.values() for value in state.values() if value.dim()]


def foreach_copy(training: Training) -> Callable[[], object]:
    sources = tensors(training)
    targets = [door.empty_pinned(tensor.shape, tensor.dtype) for tensor in sources]
    return lambda: torch._foreach_copy_(targets, sources, non_blocking=True)
