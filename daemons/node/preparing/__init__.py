"""Makes a run directory ready to start; refuses what cannot run before anything is allocated."""
