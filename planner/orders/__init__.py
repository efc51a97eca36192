"""Orders of compute instructions by themselves: their times, bounds, and a search for the best."""
