"""A whole training run: loop, data, validation, checkpoints, logs. `sw.Trainer` and `shardwright train`."""

from .callbacks import Callback, EarlyStopping, LearningRateMonitor
from .loggers import ConsoleLogger, CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from .loop import Progress
from .options import Checkpoints, LoaderOptions, Profile
from .trainer import Trainer

__all__ = [
    "CSVLogger",
    "Callback",
    "Checkpoints",
    "ConsoleLogger",
    "EarlyStopping",
    "LearningRateMonitor",
    "LoaderOptions",
    "Logger",
    "MLflowLogger",
    "Profile",
    "Progress",
    "TensorBoardLogger",
    "Trainer",
    "WandbLogger",
]
