"""TensorBoard: event files in ``RUN_DIR/tensorboard``, without TensorFlow and without torch."""

from __future__ import annotations

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.metadata import (
    PLUGIN_DATA_VERSION,
    PLUGIN_NAME,
    SESSION_START_INFO_TAG,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from penstock.daemons.monitor.trackers.sink import Reading, Subject


class TensorBoardSink:
    """One event file for each life of the process; TensorBoard reads a folder's as one run."""

    def __init__(self, subject: Subject) -> None:
        folder = subject.directory / "tensorboard"
        again = folder.is_dir() and any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))
        if not again:
            self._writer.add_event(Event(summary=_hyperparameters(subject)))

    def log(self, readings: Sequence[Reading]) -> None:
        """Writes one event for each reading."""
        for reading in readings:
            values = [Summary.Value(tag=k, simple_value=v) for k, v in reading.values.items()]
            summary = Summary(value=values)
            event = Event(wall_time=reading.at_s, step=reading.step, summary=summary)
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _hyperparameters(subject: Subject) -> Summary:
    """Returns what TensorBoard's page HParams reads; its own maker of that wants TensorFlow."""
    start = SessionStartInfo(group_name=subject.name)
    for key, value in subject.settings.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    content = HParamsPluginData(version=PLUGIN_DATA_VERSION, session_start_info=start)
    plugin = SummaryMetadata.PluginData(
        plugin_name=PLUGIN_NAME, content=content.SerializeToString()
    )
    value = Summary.Value(tag=SESSION_START_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin))
    return Summary(value=[value])
