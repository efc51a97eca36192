"""penstock.daemons.memory."""
