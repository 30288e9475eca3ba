"""Ordinary programs, which run really and in a plan."""
