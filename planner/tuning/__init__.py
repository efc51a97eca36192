"""penstock.planner.tuning."""
