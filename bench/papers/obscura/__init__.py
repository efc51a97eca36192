"""Obscura (Huang et al., USENIX ATC 2025): tables, claims, and real runs under limits."""

from bench.papers.obscura.tables import tables

__all__ = ["tables"]
