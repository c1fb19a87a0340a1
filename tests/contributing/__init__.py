"""The recipes of CONTRIBUTING.md, carried out in a scratch copy of the repository."""
