"""penstock.client.doctor."""
