"""What holds for all tests."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork, and a fork has none of the threads that OpenMP waits for
os.environ.setdefault("SHARDWRIGHT_CALIBRATE", "0")  # else the first test with "auto" would measure the machine

from hypothesis import settings

from tests.captures import keep_captures

settings.register_profile("shardwright", deadline=None)  # machines are noisy: time is no reason to fail
settings.load_profile("shardwright")
keep_captures()
gc.freeze()  # what is imported stays: no collection has to walk it
