"""How anything waits: engines, stops, locks and threads."""
