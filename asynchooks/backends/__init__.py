"""What runs steps, without hooks: raw sessions, and the creators that make them."""
