"""Tests of whole sessions."""
