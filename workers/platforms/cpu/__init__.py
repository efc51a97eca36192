"""Workers that compute on the host's cores."""
