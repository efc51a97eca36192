"""What devices and nodes hold, in bytes, over the course of a program."""
