"""penstock.workers.state."""
