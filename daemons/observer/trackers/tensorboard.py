"""TensorBoard: event files in ``RUN_DIR/tensorboard``, without TensorFlow and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary import session_start_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from penstock.daemons.observer.trackers.sink import Reading, Subject


class TensorBoardSink:
    """One event file for each life of the process; TensorBoard reads a folder's as one run."""

    def __init__(self, subject: Subject) -> None:
        folder = subject.directory / "tensorboard"
        again = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if not again:
            settings = session_start_pb(dict(subject.settings), group_name=subject.name)
            self._writer.add_event(Event(summary=settings))

    def log(self, readings: Sequence[Reading]) -> None:
        """Writes one event for each reading."""
        for reading in readings:
            values = [Summary.Value(tag=k, simple_value=v) for k, v in reading.values.items()]
            summary = Summary(value=values)
            event = Event(wall_time=reading.read_s, step=reading.step, summary=summary)
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()
