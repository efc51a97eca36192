"""Dashboards of Grafana, configuration and rules of Prometheus, and files that start both.

``dashboards/`` is the source of ``generated/``, which Grafana reads (``make dashboards``).
``provisioning/`` names the folders to Grafana. :mod:`penstock.grafana.files` writes all files.
"""
