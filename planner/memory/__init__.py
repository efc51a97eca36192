"""Bytes that devices and nodes hold over the course of a program."""
