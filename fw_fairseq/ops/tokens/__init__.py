"""Tokens that are not one step of the recurrence with one read after it."""
