"""What the scheduler knows of nodes lost with their memory, and of those that replace them."""
