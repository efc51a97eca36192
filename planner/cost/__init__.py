"""What work takes in seconds and bytes: data sheets, measured profiles, guesses, clusters."""
