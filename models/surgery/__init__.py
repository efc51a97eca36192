"""penstock.models.surgery."""
