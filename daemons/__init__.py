"""penstock.daemons."""
