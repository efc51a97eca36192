"""Weights & Biases: a run with our run's id, online, or offline in ``RUN_DIR/wandb``, which ``wandb
sync`` sends later.
"""

from __future__ import annotations

from collections.abc import Sequence

import wandb

from penstock.daemons.monitor.trackers.sink import Reading, Subject, project_of


class WandbSink:
    """A run that goes on under the same id. What a life before has logged at a step, or behind it,
    the service leaves out itself: steps only grow.
    """

    def __init__(self, subject: Subject) -> None:
        observability = subject.config.observability
        self._run = wandb.init(
            project=project_of(observability, "WANDB_PROJECT"),
            name=subject.name,
            id=subject.run_id,
            resume="allow",
            dir=str(subject.directory),
            config=dict(subject.settings),
            mode=observability.wandb_mode,
            # The console is the run's, the machine's figures are Prometheus'; code is not ours.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_stats=True,
            ),
        )

    def log(self, readings: Sequence[Reading]) -> None:
        """Hands the readings to wandb's own process."""
        for reading in readings:
            self._run.log(dict(reading.values), step=reading.step)

    def close(self) -> None:
        """Waits until all is written, or sent."""
        self._run.finish()
