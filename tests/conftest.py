"""What holds for all tests."""

import gc

from hypothesis import settings

from tests.captures import keep_captures

settings.register_profile("shardwright", deadline=None)  # machines are noisy: time is no reason to fail
settings.load_profile("shardwright")
keep_captures()


def pytest_collection_finish() -> None:
    """What is imported stays, and is a large part of what a collection would walk every time."""
    gc.collect()
    gc.freeze()
