"""What all processes of a run have in common: directory, names, logs, metrics, traces, stops."""
