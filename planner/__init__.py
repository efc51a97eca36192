"""Schedules: schemes, passes, validator, simulator, memory table. Pure functions on data; no torch,
no sockets.

``build`` turns a configuration and a block table into a :class:`~penstock.protocol.plan.plan.Plan`;
``validate`` decides whether a plan makes sense; ``simulate`` says how long it takes; ``memory``
what it needs.
"""
