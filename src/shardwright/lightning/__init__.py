"""Lightning: `Trainer(strategy=ShardwrightStrategy(plan="auto"))` trains a LightningModule unchanged.

Read `strategy.py` (what Lightning calls), `compiled.py` (what it compiles), `steps.py` and `effects.py` (a step as a
program, and its logging), `checkpoints.py`. Needs the package `lightning`. See docs/lightning.md.
"""

from .strategy import ShardwrightStrategy

__all__ = ["ShardwrightStrategy"]
