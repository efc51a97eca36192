"""Implementations of the platforms: device, memory, clock and handlers of each."""
