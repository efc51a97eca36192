"""What processes say to each other: configuration, instructions, messages, typed clients, errors."""
