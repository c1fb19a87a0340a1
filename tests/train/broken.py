"""A module that can't be imported, for a test of what is said then."""

NOTHING = 1 / 0
