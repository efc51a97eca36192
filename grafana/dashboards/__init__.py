"""Dashboards as code: a module each, over what ``panels`` makes.

Needs grafana-foundation-sdk, pinned to Grafana 11's types. ``python -m
penstock.grafana.dashboards FOLDER`` writes the JSON (``make dashboards``).
"""
