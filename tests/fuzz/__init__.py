"""Mutated files of every kind: whatever is in them, only errors of our tree come out."""
