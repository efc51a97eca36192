"""What a worker holds of the model: stages, weights, gradients, updates, swapped activations."""
