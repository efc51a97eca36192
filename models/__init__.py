"""penstock.models."""
