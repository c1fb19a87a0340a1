"""What holds for all tests."""

from hypothesis import settings

from tests.captures import keep_captures

settings.register_profile("shardwright", deadline=None)  # machines are noisy: time is no reason to fail
settings.load_profile("shardwright")
keep_captures()
