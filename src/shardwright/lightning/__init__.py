"""Lightning: `Trainer(strategy=ShardwrightStrategy(plan="auto"))` trains a LightningModule as it is.

Needs the package `lightning`. See docs/lightning.md.
"""

from .strategy import ShardwrightStrategy

__all__ = ["ShardwrightStrategy"]
