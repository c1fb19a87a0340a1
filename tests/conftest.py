"""What holds for all tests."""

import gc

from hypothesis import settings

from tests.captures import keep_captures

settings.register_profile("shardwright", deadline=None)  # machines are noisy: time is no reason to fail
settings.load_profile("shardwright")
keep_captures()
gc.freeze()  # what is imported stays: no collection has to walk it
