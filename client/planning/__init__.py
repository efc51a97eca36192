"""The commands that plan, simulate, profile and tune, with their options and outputs."""
