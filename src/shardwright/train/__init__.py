"""A whole training run: loop, data, validation, checkpoints, logs. `sw.Trainer` and `shardwright train`."""

from .averaging import Averaging
from .callbacks import Callback, EarlyStopping, LearningRateMonitor
from .faults import CheckReplicas, NonFinite, StopOnSignal
from .loggers import ConsoleLogger, CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from .loop import Progress
from .options import Checkpoints, LoaderOptions, Profile
from .trainer import Trainer

__all__ = [
    "Averaging",
    "CSVLogger",
    "Callback",
    "CheckReplicas",
    "Checkpoints",
    "ConsoleLogger",
    "EarlyStopping",
    "LearningRateMonitor",
    "LoaderOptions",
    "Logger",
    "MLflowLogger",
    "NonFinite",
    "Profile",
    "Progress",
    "StopOnSignal",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
]
