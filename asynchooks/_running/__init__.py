"""One run of a session, and what surrounds it."""
