"""Training code in the shape that public projects have it, with the one line put in."""
