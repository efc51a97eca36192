"""penstock.workers.devices."""
