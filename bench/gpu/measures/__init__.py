"""The parts of the ladder, a file each; ``MEASUREMENTS`` are run in their order."""
