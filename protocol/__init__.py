"""What processes say to each other: configuration, instructions, messages, clients, errors."""
