"""The race itself: that it runs, and that its tables say what was measured."""
