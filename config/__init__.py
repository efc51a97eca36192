"""The configuration: its keys, accepted values, and texts about mistakes."""
