"""rollouts and shielded."""
