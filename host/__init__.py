"""Ground floor: clocks, files, logs, signals, control groups. It imports nothing of ours."""
