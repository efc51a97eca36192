"""penstock.planner.memory."""
