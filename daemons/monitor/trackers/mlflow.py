"""MLflow: a run in the experiment of ``MLFLOW_EXPERIMENT_NAME``, identified by our run's id."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

# MLflow discourages stores in folders, but the user has set one.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from penstock.daemons.monitor.trackers.sink import Reading, Subject, project_of

_TAG = "penstock.run_id"
_MOST_METRICS, _MOST_PARAMS = 1000, 100
"""A request takes no more."""
_LONGEST = 500
"""Letters of a parameter's value."""


class MlflowSink:
    """Logs in requests of many metrics each."""

    def __init__(self, subject: Subject) -> None:
        observability = subject.config.observability
        self._client = MlflowClient(tracking_uri=observability.mlflow_uri)
        project = project_of(observability, "MLFLOW_EXPERIMENT_NAME")
        experiment = self._client.get_experiment_by_name(project)
        number = (
            self._client.create_experiment(project)
            if experiment is None
            else experiment.experiment_id
        )
        runs = self._client.search_runs([number], f"tags.`{_TAG}` = '{subject.run_id}'")
        if runs:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_TAG: subject.run_id}
        run = self._client.create_run(number, run_name=subject.name, tags=tags)
        self._run_id = run.info.run_id
        texts = ((key, str(value)[:_LONGEST]) for key, value in subject.settings.items())
        parameters = (Param(key, text) for key, text in texts if text)
        while some := list(islice(parameters, _MOST_PARAMS)):
            self._client.log_batch(self._run_id, params=some)

    def log(self, readings: Sequence[Reading]) -> None:
        """Sends the readings."""
        metrics = _metrics(readings)
        while some := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self) -> None:
        """Says that the run is over; a resumed one says again that it runs."""
        self._client.set_terminated(self._run_id)


def _metrics(readings: Sequence[Reading]) -> Iterator[Metric]:
    for reading in readings:
        for name, value in reading.values.items():
            yield Metric(name, value, int(reading.at_s * 1000), reading.step)
