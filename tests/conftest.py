"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("shardwright", deadline=None)  # machines are noisy: time is no reason to fail
settings.load_profile("shardwright")
