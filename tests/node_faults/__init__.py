"""Random faults of runs on several nodes: `python -m tests.node_faults`, see `trial.py` for what is done to them."""
