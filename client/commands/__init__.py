"""Commands of ``penstock`` by section of its help. A command imports what it needs when run."""
