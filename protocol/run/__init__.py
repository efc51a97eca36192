"""penstock.protocol.run."""
