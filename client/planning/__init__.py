"""penstock.client.planning."""
