"""Activities of the scheduler's machine: barrier, attempt, save, evaluation, shutdown."""
