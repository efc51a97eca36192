"""penstock.planner.orders."""
