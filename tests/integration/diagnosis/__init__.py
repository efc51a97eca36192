"""Faults planted into real runs, and the alerts that they raise.

A real Prometheus and a real Alertmanager watch the runs with the files that Penstock ships; only
the interval between scrapes is shortened, to a second. ``python -m tests.integration.diagnosis``
plants all faults of :mod:`.faults` and prints the table of docs/evidence/ALERTS.md.
"""
