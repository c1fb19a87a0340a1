"""Training runs: `sw.Trainer` and `shardwright train`.

Read `trainer.py` (settings and entry points), `setup.py` (compile), `feed.py` (data to batches), `loop.py` (updates,
validation, saving), `callbacks.py` (hooks in their order), `loggers.py` and `run.py` (the folder of a run).
"""

from .callbacks import Callback, EarlyStopping, LearningRateMonitor
from .ema_callback import EMACallback
from .faults import CheckReplicas, NonFinite, StopOnSignal
from .loggers import ConsoleLogger, CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from .loop import Progress
from .options import Checkpoints, LoaderOptions, LoggingOptions, OptimizationOptions, Profile, ValidationOptions
from .trainer import Trainer

__all__ = [
    "CSVLogger",
    "Callback",
    "CheckReplicas",
    "Checkpoints",
    "ConsoleLogger",
    "EMACallback",
    "EarlyStopping",
    "LearningRateMonitor",
    "LoaderOptions",
    "Logger",
    "LoggingOptions",
    "MLflowLogger",
    "NonFinite",
    "OptimizationOptions",
    "Profile",
    "Progress",
    "StopOnSignal",
    "TensorBoardLogger",
    "Trainer",
    "ValidationOptions",
    "WandbLogger",
]
