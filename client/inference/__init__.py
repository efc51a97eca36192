"""Commands that use a saved state or a model folder: text generation, evaluation."""
