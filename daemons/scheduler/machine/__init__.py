"""penstock.daemons.scheduler.machine."""
