"""Traced runs in the form of simulations, and costs that are fitted to them."""
