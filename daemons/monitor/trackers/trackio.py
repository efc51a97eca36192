"""trackio: a run in a project of its folder (``TRACKIO_DIR``), or wherever its environment says."""

from __future__ import annotations

from collections.abc import Sequence

import trackio

from penstock.daemons.monitor.trackers.sink import Reading, Subject, project_of


class TrackioSink:
    """A run that goes on under the same name: our run's, with its id."""

    def __init__(self, subject: Subject) -> None:
        self._run = trackio.init(
            project=project_of(subject.config.observability, "TRACKIO_PROJECT"),
            name=f"{subject.name}-{subject.run_id}",
            config=dict(subject.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, readings: Sequence[Reading]) -> None:
        """Queues the readings; trackio writes them on a thread of its own."""
        for reading in readings:
            self._run.log(dict(reading.values), step=reading.step)

    def close(self) -> None:
        """Waits until all is written."""
        self._run.finish()
