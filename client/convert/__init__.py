"""Configurations of other trainers as configurations of Penstock: ``penstock convert``."""
