"""penstock.planner.schemes."""
