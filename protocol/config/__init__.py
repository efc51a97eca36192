"""penstock.protocol.config."""
