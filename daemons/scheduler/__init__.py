"""schedulerd: one process for each run. It owns the journal and decides about each attempt.

``machine`` decides, ``service`` and ``intake`` listen. ``effects`` acts, with ``journal``,
``saved``, ``metrics_file`` and ``trace``. ``main`` connects the parts.
"""
