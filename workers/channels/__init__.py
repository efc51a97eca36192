"""Transfers of activations, gradients and checkpoints between workers."""
