"""penstock.planner.passes."""
