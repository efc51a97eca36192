"""penstock.workers.platforms."""
