"""The configuration: its keys, what they accept, and how mistakes are told."""
