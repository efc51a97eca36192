"""Code that all processes of a run share: directory, names, logs, metrics, traces, stops."""
