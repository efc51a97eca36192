"""Kinds of devices and transports: what each can do, and what emulated ones share in files."""
