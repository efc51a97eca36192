"""Transports between processes of a run: frames of workers and daemons, and clients of the
daemons.
"""
