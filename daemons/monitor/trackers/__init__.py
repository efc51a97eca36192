"""Trackers: what a run writes to ``metrics.jsonl`` goes to TensorBoard, Weights & Biases, MLflow,
trackio, or as spans to an OpenTelemetry collector.

Each tracker is a process of its own (:mod:`~penstock.daemons.monitor.trackers.main`), a child of
observerd, which starts it again when it dies and kills it when it hangs
(:mod:`~penstock.daemons.monitor.trackers.supervised`). ``metrics.jsonl`` is the queue between a
run and its trackers: no step waits for whoever reads it, and it takes no memory. How far a tracker
has read is in ``RUN_DIR/trackers/<name>.json``, so a resumed run, or a tracker that was away, goes
on where it was.
"""
