"""Stop requests, side tasks, coordinators, and the retry policy of what is lost."""
