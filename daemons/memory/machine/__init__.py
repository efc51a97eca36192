"""penstock.daemons.memory.machine."""
