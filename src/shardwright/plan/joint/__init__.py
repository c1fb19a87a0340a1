"""The joint planner: pipelines beside flat plans."""
