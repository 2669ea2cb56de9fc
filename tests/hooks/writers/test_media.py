"""Histograms, texts and figures: what the run takes, what writers get, and what each tool reads."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from trainbus.eventloop import Bus, Run, TrainLoop
from trainbus.hooks import CSVWriter, JSONLinesWriter, LoggerHook, MLflowWriter, TensorBoardWriter, WandbWriter, Writer
from trainbus.hooks.writers import histogram
from trainbus.hooks.writers.histogram import as_histogram
from trainbus.hooks.writers.media import ReportedHistogram, ReportedImage, ReportedText
from trainbus.hooks.writers.png import png
from trainbus.media import Figure, Histogram, Image, Text
from trainbus.observe import RunFolder

from .conftest import logging_loop
from .readers import column, files, rows, runs

VALUES = torch.tensor([[0.0, 1.0, 1.0], [2.0, 4.0, 4.0]])


class Album(Writer):
    def __init__(self):
        self.kept = []

    def write_scalars(self, scalars, step, where): ...

    def write_image(self, name, image, step):
        self.kept.append((name, image, step))

    def write_histogram(self, name, histogram, step):
        self.kept.append((name, histogram, step))

    def write_text(self, name, text, where):
        self.kept.append((name, text, where.iter))


def report(*writers, work_dir=None, **entries):
    """A run of one epoch of two iterations; it reports the entries in the second and in a validation."""
    with Run(Bus(LoggerHook(writers=writers)), model=torch.nn.Linear(1, 1), work_dir=work_dir) as run:
        for _ in run.epochs(1):
            for batch in run.train(range(2)):
                if batch:
                    run.report(**entries)
            for _ in run.validate(range(1)):
                run.report(**entries)


def test_writers_get_histograms_and_texts_with_their_stage_and_step():
    album = Album()
    report(album, weights=Histogram(VALUES), samples=Text("a <b>\nc"))
    weights, text = "weights", "samples"
    assert [(name, step) for name, _, step in album.kept] == [
        *((f"train/{weights}", 2), (f"train/{text}", 2), (f"val/{weights}", 1), (f"val/{text}", 2)),
    ]
    histogram = album.kept[0][1]
    assert (histogram.least, histogram.greatest, histogram.total, histogram.mean) == (0.0, 4.0, 6, 2.0)
    assert len(histogram.counts) == 64
    assert album.kept[1][1] == "a <b>\nc"


def test_reported_values_are_copied_when_reported():
    album, values = Album(), torch.ones(3, requires_grad=True)
    with Run(Bus(LoggerHook(writers=[album])), model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            for _ in run.train(range(1)):
                run.report(ones=Histogram(values))
                with torch.no_grad():
                    values.zero_()
    assert album.kept[0][1].least == 1.0


@pytest.mark.parametrize(
    "values",
    [
        *(torch.tensor([0, 1, 1, 4], dtype=dtype) for dtype in (torch.int64, torch.uint8, torch.bfloat16, torch.float8_e5m2)),
        *(np.array([0, 1, 1, 4], dtype) for dtype in (">i4", "float16", "longdouble", "uint16", "uint64")),
        np.array([[0, 9], [1, 9], [1, 9], [4, 9]])[:, 0],
    ],
    ids=str,
)
def test_all_types_of_real_numbers_are_counted(values):
    made = as_histogram(values, 4)
    assert (made.counts, made.low, made.high) == ([1, 2, 0, 1], 0.0, 4.0)
    assert made.edges.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (made.sum, made.sum_of_squares) == (6.0, 18.0)


def test_counts_are_those_of_numpy_over_many_parts(change):
    change(histogram.PART, 1000)
    values = torch.randn(5432, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = as_histogram(values, 50)
    counts, edges = np.histogram(values.numpy(), 50)
    assert made.counts == counts.tolist()
    assert np.allclose(made.edges, edges)
    assert made.mean == pytest.approx(values.mean().item())
    assert made.std == pytest.approx(values.std(correction=0).item())


def test_values_that_are_not_finite_are_left_out_and_said_once_for_a_name(logs):
    album, broken = Album(), torch.tensor([math.nan, math.inf, -math.inf, 1.0, 3.0])
    report(album, weights=Histogram(broken))
    assert [(one.nan, one.infinite, one.total, one.least, one.greatest) for _, one, _ in album.kept] == [
        (1, 2, 2, 1.0, 3.0)
    ] * 2
    told = [line for line in logs if line.get("id") == "histogram-not-finite"]
    assert [(line["histogram"], line["nan"], line["infinite"]) for line in told] == [
        ("train/weights", 1, 2),
        ("val/weights", 1, 2),
    ]


@pytest.mark.parametrize("value", [0.0, 3.5, -1e30, 5e-324])
def test_equal_values_are_in_one_bin_around_them(value):
    made = as_histogram(torch.full((7,), value, dtype=torch.float64), 3)
    assert made.counts == [0, 7, 0]
    assert made.low < value < made.high


def test_a_histogram_without_a_finite_value_has_empty_bins():
    made = as_histogram(torch.tensor([math.nan, math.inf]), 2)
    assert (made.counts, made.nan, made.infinite, made.mean, made.std) == ([0, 0], 1, 1, 0.0, 0.0)
    assert as_histogram(torch.tensor([1e308, -1e308], dtype=torch.float64), 2).infinite == 2


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (Histogram([1.0]), TypeError, r"'bad'.*\[1\.0\]"),
        (Histogram(torch.zeros(0, 3)), ValueError, r"'bad'.*\(0, 3\)"),
        (Histogram(torch.zeros(2, dtype=torch.complex64)), ValueError, r"complex64.*abs\(\)"),
        (Histogram(np.array(["a"])), ValueError, "<U1"),
        (Histogram(torch.eye(2).to_sparse()), ValueError, r"sparse_coo.*to_dense\(\)"),
        (Histogram(torch.zeros(2, device="meta")), ValueError, "meta"),
        (Text(3), TypeError, r"'bad'.*str\(value\).*3"),
        (Figure("plot.png"), TypeError, r"'bad'.*'plot\.png'.*bad=Image"),
    ],
)
def test_an_invalid_value_is_an_error_when_reported(value, kind, told):
    with pytest.raises(kind, match=told):
        report(Album(), bad=value)


@pytest.mark.parametrize("bins", [0, 513, 2.5])
def test_an_invalid_number_of_bins_is_an_error(bins):
    run = Run(Bus(LoggerHook(writers=[Album()])), model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=f"'bad'.*bins={bins}"), run:
        run.report(bad=Histogram(VALUES, bins=bins))


def test_a_long_text_is_cut_and_says_so():
    album = Album()
    report(album, log=Text("x" * 70_000))
    assert album.kept[0][1] == "x" * 65_536 + "… (4,464 more characters)"


@pytest.mark.parametrize(
    ("kind", "value"), [("image", Image(torch.zeros(2, 2))), ("histogram", Histogram(VALUES)), ("text", Text("a"))]
)
def test_a_missing_writer_is_warned_of_once(tmp_path, logs, kind, value):
    report(CSVWriter(), work_dir=tmp_path, mine=value)
    assert [line[kind] for line in logs if f"takes {kind}s" in line["event"]] == ["mine"]


@pytest.fixture
def figure():
    figures = pytest.importorskip("matplotlib.figure")
    made = figures.Figure(figsize=(2, 1), dpi=50, facecolor="red")
    made.subplots().plot([1, 2, 3])
    return made


@pytest.mark.parametrize("part", [lambda figure: figure, lambda figure: figure.axes[0]], ids=["figure", "axes"])
def test_a_figure_is_drawn_as_an_image_and_stays_as_it_was(figure, part):
    album, canvas = Album(), figure.canvas
    report(album, curve=Figure(part(figure)))
    name, image, step = album.kept[0]
    assert (name, step, image.shape, image[0, 0].tolist()) == ("train/curve", 2, (50, 100, 4), [255, 0, 0, 255])
    assert np.ptp(image[..., 2]) > 100  # the curve
    assert figure.canvas is canvas


def test_a_figure_is_not_drawn_without_a_writer(figure, monkeypatch):
    monkeypatch.setattr(type(figure), "draw", lambda self, renderer: pytest.fail("drawn"))
    with Run(model=torch.nn.Linear(1, 1)) as run:
        run.report(curve=Figure(figure))


def test_numbers_and_media_are_reported_together_and_media_are_no_outputs():
    album, seen = Album(), []
    bus = Bus(LoggerHook(writers=[album]))
    bus.on("after_train_iter", lambda event: seen.append(event.outputs))
    with Run(bus, model=torch.nn.Linear(1, 1)) as run:
        for _ in run.epochs(1):
            for batch in run.train(range(2)):
                run.report(loss=batch, answer=Text("yes") if batch else 3.0)
    assert seen == [{"loss": 0, "answer": 3.0}, {"loss": 1}]
    assert album.kept == [("train/answer", "yes", 2)]


def test_a_step_may_return_media_beside_its_loss():
    album, model = Album(), torch.nn.Linear(1, 1)
    step = lambda model, batch: {"loss": model(torch.ones(1, 1)).sum(), "answer": Text("yes")}  # noqa: E731
    bus, optimizer = Bus(LoggerHook(writers=[album])), torch.optim.SGD(model.parameters(), lr=0.1)
    TrainLoop(model, optimizer, step=step, train_data=[1], val_data=[1], bus=bus, max_epochs=1, sanity=0).run()
    assert album.kept == [("train/answer", "yes", 1), ("val/answer", "yes", 1)]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_encoded_image_is_what_pillow_reads(channels):
    pictures = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(1).integers(0, 256, (5, 7, channels), np.uint8)
    read = np.asarray(pictures.open(io.BytesIO(png(image))))
    assert np.array_equal(read.reshape(image.shape), image)


# --------------------------------------------------------------------------------------------------- what the tools read


def reported(writer, work_dir, **options):
    """A loop that reports one of each in its second iteration, and after its validations."""

    def report(event):
        if event.progress.stage == "val" or event.progress.iter == 1:
            event.run.report(weights=Histogram(VALUES, bins=4))
            event.run.report(samples=Text("a <b>\nc"))
            event.run.report(noise=Image(torch.ones(3, 2, 5)))

    loop = logging_loop(writer, work_dir=work_dir, **options)
    loop.bus.on("after_train_iter", report)
    loop.bus.on("after_val_epoch", report)
    loop.run()


def test_json_lines_have_all_and_the_images_are_files(tmp_path):
    reported(JSONLinesWriter(), tmp_path)
    lines = [*RunFolder(tmp_path).media()]
    assert [(type(line), line.name, line.step, line.epoch, line.iter) for line in lines[:3]] == [
        (ReportedHistogram, "train/weights", 2, 1, 2),
        (ReportedText, "train/samples", 2, 1, 2),
        (ReportedImage, "train/noise", 2, 1, 2),
    ]
    assert [(line.name, line.step, line.epoch, line.iter) for line in lines[3:9:3]] == [
        ("val/weights", 1, 1, 3),
        ("val/weights", 2, 2, 6),
    ]
    histogram, text, image = lines[:3]
    assert (histogram.counts, histogram.low, histogram.high, histogram.mean) == ([1, 2, 1, 2], 0.0, 4.0, 2.0)
    assert text.text == "a <b>\nc"
    assert (image.width, image.height) == (5, 2)
    assert RunFolder(tmp_path).picture(image.file, 10_000) == (tmp_path / "media" / image.file).read_bytes()
    assert all(json.loads(line)["time"] > 1e9 for line in (tmp_path / "media.jsonl").read_text().splitlines())


def test_json_lines_of_another_name_have_media_of_their_own(tmp_path):
    reported(JSONLinesWriter("raw.jsonl"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if "media" in path.name) == ["raw_media", "raw_media.jsonl"]


def test_a_picture_is_read_from_the_folder_of_images_only(tmp_path):
    reported(JSONLinesWriter(), tmp_path)
    folder = RunFolder(tmp_path)
    (tmp_path / "media" / "text.png").write_text("no picture")
    (image, *_) = [line for line in folder.media() if isinstance(line, ReportedImage)]
    (tmp_path / "outside.png").write_bytes(folder.picture(image.file, 10_000))
    assert [folder.picture(name, 10_000) for name in ("../outside.png", "gone.png", "text.png", "..", "")] == [None] * 5
    assert folder.picture(image.file, 10) is None


def test_tensorboard_reads_histograms_and_texts(events, tmp_path):
    pytest.importorskip("tensorboard")
    reported(TensorBoardWriter(), tmp_path)
    found = events(tmp_path / "tensorboard")
    train, (first, second) = found.Histograms("train/weights"), found.Histograms("val/weights")
    assert [one.step for one in (*train, first, second)] == [2, 1, 2]
    read = train[0].histogram_value
    assert (read.min, read.max, read.num, read.sum, read.sum_squares) == (0.0, 4.0, 6.0, 12.0, 38.0)
    assert (read.bucket_limit, read.bucket) == ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 1.0, 2.0])
    texts = [*found.Tensors("train/samples/text_summary"), *found.Tensors("val/samples/text_summary")]
    assert [(one.step, one.tensor_proto.string_val) for one in texts] == [(step, [b"a <b>\nc"]) for step in (2, 1, 2)]


@pytest.mark.usefixtures("offline")
def test_wandb_reads_histograms_and_texts(tmp_path):
    pytest.importorskip("wandb")
    reported(WandbWriter(), tmp_path)
    (path,) = files(tmp_path)
    found = rows(path)
    read = {name: column(found, f"train/weights/{name}") for name in ("_type", "values", "bins")}
    assert read == {"_type": [(2, "histogram")], "values": [(2, [1, 2, 1, 2])], "bins": [(2, [0.0, 1.0, 2.0, 3.0, 4.0])]}
    ((step, page),) = column(found, "train/samples/path")
    assert step == 2
    assert "<pre>a &lt;b&gt;\nc</pre>" in (path.parent / "files" / page).read_text()
    assert [step for step, _ in column(found, "val/samples/path")] == [3, 6]
    assert column(found, "val/step") == [(3, 1), (6, 2)]  # also in the rows of the validation's metrics


@pytest.mark.long
@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_histograms_and_texts(client, tmp_path):
    reported(MLflowWriter(), tmp_path)
    found = client(tmp_path)
    (run,) = runs(found)
    kept = [
        one.path
        for folder in ("histograms/train/weights", "texts/val/samples")
        for one in found.list_artifacts(run.info.run_id, folder)
    ]
    assert kept == ["histograms/train/weights/2.json", "texts/val/samples/1.txt", "texts/val/samples/2.txt"]
    histogram, text, _ = [Path(found.download_artifacts(run.info.run_id, path)).read_text() for path in kept]
    assert [json.loads(histogram)[name] for name in ("counts", "low", "high")] == [[1, 2, 1, 2], 0.0, 4.0]
    assert text == "a <b>\nc"


def test_a_histogram_without_a_finite_value_is_kept_by_all(events, tmp_path, offline):
    for needed in ("tensorboard", "wandb"):
        pytest.importorskip(needed)
    report(TensorBoardWriter(), WandbWriter(), JSONLinesWriter(), work_dir=tmp_path, bad=Histogram(torch.tensor([math.nan])))
    (found,) = events(tmp_path / "tensorboard").Histograms("train/bad")
    assert (found.step, found.histogram_value.num) == (2, 0)
    assert [line.nan for line in RunFolder(tmp_path).media()] == [1, 1]
