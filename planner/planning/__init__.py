"""The way from a configuration to a plan, which train, plan, tune and doctor take."""
