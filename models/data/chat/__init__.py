"""Conversations of fine-tuning data: requests, chat templates, and labels of counted tokens."""
