"""Metrics of a run for Prometheus: every metric of every process, as data, and registries of
values.

Names and labels are a contract with dashboards and alerts; docs/METRICS.md is generated from them.
"""
