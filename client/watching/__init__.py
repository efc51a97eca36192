"""penstock.client.watching."""
