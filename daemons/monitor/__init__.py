"""Daemons that observe a run: metrics exporter, observer of samples, trackers."""
