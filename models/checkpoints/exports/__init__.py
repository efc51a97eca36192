"""The parts of an export: its tensors, the folder of a whole model, and the verification."""
