"""Costs of work in seconds and bytes: data sheets, measured profiles, guesses, clusters."""
