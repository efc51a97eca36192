"""penstock.workers.telemetry."""
