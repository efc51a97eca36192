"""penstock.workers.platforms.cuda."""
