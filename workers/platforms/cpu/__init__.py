"""penstock.workers.platforms.cpu."""
