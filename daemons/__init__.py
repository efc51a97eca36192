"""The processes that own a run's state and decide about it: one scheduler, and on each node a
supervisor, a memoryd and an optimizerd.
"""
