"""Trackers send the lines of ``metrics.jsonl`` to TensorBoard, Weights & Biases, MLflow, trackio,
or as spans to an OpenTelemetry collector.

Each tracker has its own process (:mod:`~penstock.daemons.monitor.trackers.main`), a child of
observerd. observerd restarts a tracker that dies and kills one that hangs
(:mod:`~penstock.daemons.monitor.trackers.supervised`).

A thread for each tracker in one process would not isolate them. A library that kills the process
would end the others each time it is tried again. A library that holds the interpreter's lock would
stop them all. A hung thread cannot be killed, so its tracker could not be retried. The libraries
also share protobuf's registry and process-wide settings.

``metrics.jsonl`` is the queue between a run and its trackers: no step waits for a reader, and it
takes no memory. ``RUN_DIR/trackers/<name>.json`` records how far a tracker has read, so a resumed
run or a restarted tracker continues there.
"""
