"""penstock.planner.traces."""
