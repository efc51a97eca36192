"""schedulerd: one per job; owns the journal and decides, attempt by attempt, what counts.

The folder ``machine`` decides, ``service`` listens (with ``intake``),
``effects`` acts (with ``journal``, ``saved``, ``metrics_file`` and ``trace``), ``main`` wires.
"""
