"""Data that processes exchange: plans and instructions, messages, clients, metrics, security."""
