"""Commands that move checkpoints of other trainers in, and that list their tensors."""
