"""TensorBoard event files by TensorBoard's own writer: no torch, no TensorFlow."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoardLog:
    """Scalars and pictures of one run; a background thread of the writer does the I/O."""

    def __init__(self, folder: Path, *, resume_after: int | None = None) -> None:
        """resume_after: last iteration that counts; TensorBoard hides what an earlier process wrote of later ones."""
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        if resume_after is not None:
            self._add(Event(step=resume_after + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._add(Event(step=iteration, summary=summary))

    def image(self, iteration: int, tag: str, picture: np.ndarray) -> None:
        """picture: uint8 [H, W, 3] RGB."""
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        height, width, _ = picture.shape
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=buffer.getvalue())
        self._add(Event(step=iteration, summary=Summary(value=[Summary.Value(tag=tag, image=image)])))

    def close(self) -> None:
        """Waits until everything is on the disk."""
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
