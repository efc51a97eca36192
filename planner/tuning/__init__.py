"""Searches for the schedule that is fastest on a cluster within its memory."""
