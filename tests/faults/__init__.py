"""More than 100 faults of one line each, chosen by hand, of which the suite must catch all: `python -m tests.faults`.

Those of the emitter are injected by the suite itself (`test_emitter.py`): the check of generated code refuses each.
"""
