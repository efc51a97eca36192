"""Code that all daemons share.

* ``events``: events and effects that several machines know.
* ``loop``: feeds a machine with events and has its effects carried out.
* ``story``: records the last events and effects of a machine.
* ``messages``: turns the scheduler's messages into events, and effects into messages.

The decisions of a daemon are in its own folder ``machine``.
"""
