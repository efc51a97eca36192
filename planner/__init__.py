"""penstock.planner."""
