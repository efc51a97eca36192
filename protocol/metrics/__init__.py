"""What a run tells Prometheus: every metric of every process, as data, and pages that hold them.

Names and labels are a contract with dashboards and alerts; docs/METRICS.md is written from it.
"""
