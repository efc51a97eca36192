"""penstock.models.data."""
