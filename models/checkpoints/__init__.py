"""Weights of models in files: initial ones, local directories, and exports."""
