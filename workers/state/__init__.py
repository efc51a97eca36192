"""Model state of a worker: stages, weights, gradients, updates, swapped activations."""
