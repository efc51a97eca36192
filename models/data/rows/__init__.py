"""Rows of whole samples."""
