"""penstock.workers."""
