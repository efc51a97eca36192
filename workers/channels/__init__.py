"""How activations, gradients and checkpoints get from one worker to another."""
