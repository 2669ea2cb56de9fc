"""What ``run.report`` takes beside numbers: images, histograms, texts and figures."""

from trainbus.eventloop.media import Figure, Histogram, Image, Text

__all__ = ["Figure", "Histogram", "Image", "Text"]
