"""What shows runs: Grafana's dashboards, Prometheus' configuration and rules, and how they start.

``dashboards/`` is their source and ``generated/`` what Grafana reads (``make dashboards``);
``provisioning/`` tells Grafana where things are. :mod:`penstock.grafana.files` hands all of it out.
"""
