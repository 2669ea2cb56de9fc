import math

import numpy as np
import pytest
import torch

from trainbus.eventloop import Bus, Run
from trainbus.hooks import CSVWriter, LoggerHook, Writer
from trainbus.hooks.writers.base import as_image
from trainbus.media import Image


class Album(Writer):
    def __init__(self):
        self.images = []

    def write_scalars(self, scalars, step, where): ...

    def write_image(self, name, image, step):
        self.images.append((name, step, image))


def report(*writers, image=None):
    """A run of two epochs of two iterations and a validation that reports an image in each iteration."""
    bus = Bus(LoggerHook(writers=writers))
    with Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(2):
            for _ in run.train(range(2)):
                run.report(noise=Image(torch.zeros(3, 4, 5) if image is None else image))
            for _ in run.validate(range(1)):
                run.report(digits=Image(np.ones((4, 5))))
    return run


def test_images_have_their_stage_its_step_and_uint8_of_height_width_channels():
    album = Album()
    report(album)
    train, val = "train/noise", "val/digits"
    steps = [(train, 1), (train, 2), (val, 1), (train, 3), (train, 4), (val, 2)]
    assert [(name, step) for name, step, _ in album.images] == steps
    noise, digits = album.images[0][2], album.images[2][2]
    assert (noise.shape, noise.dtype, noise.max()) == ((4, 5, 3), np.uint8, 0)
    assert (digits.shape, digits.dtype, digits.min()) == ((4, 5, 1), np.uint8, 255)


def test_a_handler_gets_a_reported_image_which_is_copied():
    album, image, heard = Album(), torch.ones(1, 2, 2, requires_grad=True), []
    bus = Bus(LoggerHook(writers=[album]))
    bus.on("image_reported", lambda event: heard.append((event.name, event.progress.iter, event.image.shape)))
    with Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            for _ in run.train(range(1)):
                run.report(noise=Image(image))
                with torch.no_grad():
                    image.zero_()
    assert heard == [("noise", 0, (1, 2, 2))]
    assert album.images[0][2].min() == 255


def test_a_missing_image_writer_is_warned_of_once(tmp_path, logs):
    report(CSVWriter())
    assert [line["image"] for line in logs if line.get("id") == "no-writer-for-kind"] == ["noise"]


@pytest.mark.parametrize(
    ("image", "value"),
    [
        (torch.zeros(2, 3, 4, 5), r"'noise'.*\(2, 3, 4, 5\)"),
        (torch.zeros(5, 4, 5), r"\(5, 4, 5\)"),
        (torch.zeros(7), r"\(7,\)"),
        (np.zeros((0, 4)), r"\(0, 4\)"),
        (torch.zeros(4, 4, dtype=torch.int64), "torch.int64"),
        (np.zeros((4, 4), dtype=complex), "complex128"),
        ("picture.png", "'picture.png'"),
    ],
)
def test_an_invalid_image_is_an_error_when_reported(image, value):
    with pytest.raises(TypeError if isinstance(image, str) else ValueError, match=value):
        report(Album(), image=image)


def test_channels_are_detected_first_or_last_floats_are_scaled_and_clipped_and_nan_is_black():
    pixels = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
    assert np.array_equal(as_image(pixels), pixels)
    assert np.array_equal(as_image(np.moveaxis(pixels, -1, 0)), pixels)
    assert as_image(np.zeros((3, 7, 3))).shape == (7, 3, 3)
    image = as_image(torch.tensor([[0.0, 0.5, 1.0], [-1.0, 2.0, math.nan]], dtype=torch.bfloat16))
    assert image[..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    assert as_image(torch.tensor([[True, False]]))[..., 0].tolist() == [[255, 0]]
