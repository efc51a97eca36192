"""The clusters of the SPipe paper: machines, systems, constants, predictions, our plans."""
