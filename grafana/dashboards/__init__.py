"""Grafana's dashboards as tables of panels, and the code that renders the tables.

Each ``*.yaml`` file is a dashboard: sections of panels. :mod:`.tables` describes the format, and
``make dashboards`` writes the JSON. Rendering needs grafana-foundation-sdk, pinned to the types of
Grafana 11.
"""
