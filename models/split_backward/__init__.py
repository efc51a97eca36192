"""A backward in two halves: input gradients first, weight gradients when there is time."""
