"""The tests. What they start inherits these settings, also processes that start before a conftest is read."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests fork, and a fork has none of the threads that OpenMP waits for
os.environ.setdefault("SHARDWRIGHT_CALIBRATE", "0")  # else the first test with "auto" would measure the machine
