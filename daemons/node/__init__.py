"""penstock.daemons.node."""
