"""penstock.planner.cost."""
