"""The public names are few, and no change adds or drops one by accident."""

import shardwright

PUBLIC = (
    "CompileOptions PipelineOptions Trainer diff experts explain launch load opaque parallelize plan register_op "
    "rehearse report save verify"
).split()


def test_the_public_names_are_these():
    assert sorted(shardwright.__all__) == PUBLIC


def test_every_public_name_is_there_and_says_what_it_does():
    for name in PUBLIC:
        assert getattr(shardwright, name).__doc__, f"sw.{name} has no docstring"
