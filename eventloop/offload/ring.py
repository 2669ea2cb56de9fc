"""Rows of scalars on their device: written by the training thread, read by a consumer with one copy for many events.

A :class:`Ring` is a chain of pages of :data:`ROWS` rows. To publish an event, the training thread copies its 0-dim tensors
into the next row, which is one ``torch._foreach_copy_`` and needs no memory, no number and no wait. When a consumer gets to
an event (its ``batch`` or interval is due), it has all rows copied to the host that were written by then; the events that
follow find their numbers there.

An event holds on to its page, and a page gives its memory back to the ring when nothing refers to it any more, whatever has
become of the events: delivered, dropped or failed. So no row is written again while somebody may still read it, and there
are never more pages than events in the lanes.

Publishers on several threads need no lock: each takes a row of its own (``next`` is atomic), and marks it as written after
the copy was queued.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache, partial
from typing import Any, Final

import msgspec
import torch

ROWS: Final = 64
"""Rows of a page; one copy to the host moves that many events at most."""

_SPARE = 16  # pages kept for reuse: what a full lane of 1024 events needs
_FIRST: Final = b"\0"  # of a row that is not written

Tensors = tuple[torch.Tensor, ...]

# Looked up once: a hundred nanoseconds are a tenth of what an event may cost. Switching grad mode by hand is ten times cheaper
# than entering torch.no_grad().
_foreach_copy = torch._foreach_copy_
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled


class Ring:
    """Rows of ``width`` scalars of one dtype on one device.

    Args:
        dtype: of the scalars; a number that is converted would be another number.
        device: where they are.
        width: scalars in a row.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, width: int) -> None:
        self._dtype = dtype
        self._device = device
        self._width = width
        self._spare: deque[_Sheet] = deque(maxlen=_SPARE)
        self._page: Page = self._bind(_Sheet(dtype, device, width))

    def write(self, tensors: Tensors) -> Cell:
        """Copy the values that ``tensors`` have now into a row, without waiting for them.

        Raises:
            RuntimeError, TypeError: one of them is no scalar.
        """
        page = self._page
        index = next(page.free, None)
        if index is None:
            page, index = self._turn()
        views = page.views[index] or page.open_row(index)
        if _is_grad_enabled():
            _set_grad_enabled(False)
            try:
                _foreach_copy(views, tensors)
            finally:
                _set_grad_enabled(True)
        else:
            _foreach_copy(views, tensors)
        page.written[index] = 1
        return Cell(page, index)

    def _turn(self) -> tuple[Page, int]:
        try:
            sheet = self._spare.pop()  # the last one used, which is the one in the caches
        except IndexError:
            sheet = _Sheet(self._dtype, self._device, self._width)
        page = self._page = self._bind(sheet)
        return page, next(page.free)

    def _bind(self, sheet: _Sheet) -> Page:
        return Page(sheet, self._spare)


class CudaRing:
    """The same on a GPU: a ring for each stream that is written on; a page is read behind what its stream has queued."""

    def __init__(self, dtype: torch.dtype, device: torch.device, width: int) -> None:
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._rings: dict[int, _StreamRing] = {}
        self._make = partial(_StreamRing, dtype, device, width)

    def write(self, tensors: Tensors) -> Cell:
        """Copy the values that ``tensors`` will have, once what is queued before is done, into a row."""
        stream = self._current_stream(self._index)
        ring = self._rings.get(stream)
        if ring is None:
            ring = self._rings[stream] = self._make()
        return ring.write(tensors)


class _StreamRing(Ring):
    """Rows that are written on the stream that was current when the ring was made, and read through pinned memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device, width: int) -> None:
        self._stream = torch.cuda.current_stream(device)
        super().__init__(dtype, device, width)

    def _bind(self, sheet: _Sheet) -> Page:
        return CudaPage(sheet, self._spare, self._stream)


def make_ring(dtype: torch.dtype, device: torch.device, width: int) -> Ring | CudaRing:
    """Return the ring for scalars like these."""
    return (CudaRing if device.type == "cuda" else Ring)(dtype, device, width)


class Cell(msgspec.Struct, eq=False):
    """A row that was written: what an event on its way keeps. Looks like a ``torch.cuda.Event`` to who has to wait for it."""

    page: Page
    index: int

    def query(self) -> bool:
        """Return True if :meth:`numbers` need not wait; begins the copy to the host if nobody has."""
        return self.page.ready(self.index)

    def synchronize(self) -> None:
        """Wait until the numbers are on the host."""
        self.page.numbers(self.index)

    def numbers(self) -> list[Any]:
        """Return the row, as Python numbers."""
        return self.page.numbers(self.index)


class _Sheet:
    """The memory of a page. Views of its rows are made when they are first needed, and kept."""

    __slots__ = ("host", "tensor", "views")

    def __init__(self, dtype: torch.dtype, device: torch.device, width: int) -> None:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
            self.tensor = torch.empty((ROWS, width), dtype=dtype, device=device)
        self.host: torch.Tensor | None = None
        self.views: list[Tensors | None] = [None] * ROWS


class Page:
    """One filling of a sheet."""

    def __init__(self, sheet: _Sheet, spare: deque[_Sheet]) -> None:
        self.free = iter(range(ROWS))
        self.views = sheet.views
        self.written = bytearray(ROWS)
        self._sheet = sheet
        self._spare = spare
        self._numbers: list[list[Any] | None] = [None] * ROWS

    def __del__(self) -> None:
        self._spare.append(self._sheet)  # nobody refers to a row of it any more

    def open_row(self, index: int) -> Tensors:
        """Make the views of a row; once for each row of a sheet."""
        with torch.inference_mode(False), torch.no_grad():
            views = self.views[index] = self._sheet.tensor[index].unbind()
        return views

    def ready(self, index: int) -> bool:
        """Return True if reading that row means no waiting."""
        return True

    def numbers(self, index: int) -> list[Any]:
        """Return a row that was written, and read those after it that are written, too."""
        found = self._numbers[index]
        if found is None:
            end = self._end(index)
            # Two consumers may both do this; they read the same.
            self._numbers[index:end] = rows = self._sheet.tensor[index:end].tolist()
            found = rows[0]
        return found

    def _end(self, index: int) -> int:
        end = self.written.find(_FIRST, index)
        return ROWS if end < 0 else end


class CudaPage(Page):
    """Rows on a GPU, written on ``stream``."""

    def __init__(self, sheet: _Sheet, spare: deque[_Sheet], stream: torch.cuda.Stream) -> None:
        super().__init__(sheet, spare)
        self._stream = stream
        self._copies: list[tuple[torch.Tensor, torch.cuda.Event, int, int] | None] = [None] * ROWS
        self._copying = threading.Lock()

    def ready(self, index: int) -> bool:
        """Return True if the row is on the host; begins the copy if nobody has."""
        _, copied, _, _ = self._copy(index)
        return bool(copied.query())  # type: ignore[no-untyped-call]

    def numbers(self, index: int) -> list[Any]:
        """Return a row, after waiting for its copy; on the consumer's thread."""
        found = self._numbers[index]
        if found is None:
            host, copied, start, end = self._copy(index)
            copied.synchronize()
            self._numbers[start:end] = rows = host[start:end].tolist()
            found = rows[index - start]
        return found

    def _copy(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event, int, int]:
        """Return where the row is being copied to, what says that it has arrived, and the range of rows of that copy."""
        with self._copying:
            found = self._copies[index]
            if found is None:
                end = self._end(index)
                found = (*self._begin_copy(index, end), index, end)
                self._copies[index:end] = [found] * (end - index)
            return found

    def _begin_copy(self, start: int, end: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Queue the copy of these rows behind what writes them, on a stream of its own: training does not wait for it."""
        sheet = self._sheet
        if sheet.host is None:
            sheet.host = torch.empty(sheet.tensor.shape, dtype=sheet.tensor.dtype, pin_memory=True)
        stream = _copy_stream(sheet.tensor.device)
        stream.wait_stream(self._stream)
        with torch.cuda.stream(stream):
            sheet.host[start:end].copy_(sheet.tensor[start:end], non_blocking=True)
            return sheet.host, stream.record_event()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
