"""Plans and what they are made of: instructions, stages, placements, profiles, optimizer steps."""
