"""What all daemons share.

``events`` holds the events and effects that several machines know, ``story`` remembers what a
machine heard and decided, ``loop`` feeds a machine and has its effects carried out, ``messages``
turns the scheduler's messages into events and effects into messages. What a daemon decides is in
its own folder ``machine``.
"""
