"""The strategy: compiles a LightningModule for all processes of a Trainer.

    Trainer(strategy=ShardwrightStrategy(plan="auto"), devices=8).fit(module)

By default the steps of the module are compiled (`steps.py`): with training_step the loss is part of
the program. With `parts=[...]`, and under manual optimization, submodules are compiled separately and
steps run eagerly. Checkpoints are folders of `sw.save`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states, reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins import Precision as LightningPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import load_weights
from ..compile import count_replicas
from ..compiled_parts import Parts
from ..errors import InputError
from ..options import MOVED, CompileOptions, check_moved, expect_only, read_options
from ..plan.request import PlanLike, read_source
from ..runtime import accelerator
from ..runtime.model.inputs import Mode
from ..runtime.world import here
from . import checkpoints
from .compiled import CompiledModule, CompiledParts, CompiledSteps, heavy_parts
from .examples import example_of

MARK = "_shardwright_compiled"  # the attribute of a module that was compiled


class ShardwrightStrategy(ParallelStrategy):
    """Trains a LightningModule under a plan.

    plan        as in sw.parallelize: "auto", a plan string, a Plan, the path of a plan file, a function
    parts       compile these submodules, each at its first call, and run the steps eagerly. Without it the
                steps are compiled; under manual optimization, every child that has parameters
    inputs      "global": the dataloader yields the global batch, the same on every rank, so that a run under any
                plan equals the run of one device; "per_replica": each data-parallel replica loads its own samples;
                "per_rank": each rank does
    example     a batch to compile for; default: the first one of the dataloader
    weights     values of parameters on meta: by the path of a submodule, "" for the module, a
                safetensors file or a Hugging Face folder
    timeout     of the process group
    options     further keyword arguments of sw.parallelize: cluster, memory, constraints, pipeline, compile, ...
    """

    def __init__(
        self, plan: PlanLike = "auto", *, parts: Parts | None = None, inputs: Mode = "global", example: Any = None,
        weights: Mapping[str, str | Path] | None = None, timeout: timedelta | float = 600.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_moved(list(options), MOVED, "ShardwrightStrategy")
        own = [field.name for field in fields(CompileOptions) if field.name not in ("parts", "timeout")]
        compile = read_options(CompileOptions, options.get("compile"))
        expect_only(compile, own, "ShardwrightStrategy", "it has an argument of this name")
        self._options = {"plan": plan, "inputs": inputs, **options}
        self._parts, self._example, self._weights = parts, example, dict(weights or {})
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self.num_nodes = 1
        self._names: checkpoints.Names = []  # of the optimizers' parameters
        self.compiled: CompiledModule | None = None

    # -- processes ---------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether ranks load different samples: if so, Lightning adds its own sampler to the dataloaders."""
        return bool(self._options["inputs"] != "global")

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """How many there are on this node."""
        return len(self.parallel_devices or ())

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Set the ranks of this process in the cluster environment."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        cpu = self.root_device.type == "cpu"
        if self.world_size > 1:  # the runtime reads its device and node from here
            os.environ.update(LOCAL_RANK=str(self.local_rank), LOCAL_WORLD_SIZE=str(self.num_processes))
        if self.world_size > 1 or (cpu and accelerator.is_available()):  # a single process uses its accelerator
            backend = accelerator.backend_for(self.root_device.type)
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)
        if not self.is_distributed:  # dataloaders shuffle alike
            _set_rng_states(self.broadcast(_collect_rng_states(include_cuda=False)))

    # -- the module --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and isinstance(self.lightning_module, LightningModule)
        self.accelerator.setup(trainer)
        module, fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self.compiled = known = self._known(module)
        self.model = module
        if known is None:
            self.model = self.precision_plugin.convert_module(module)
        self._reset_optimizers_and_schedulers()
        if fitting:
            self.setup_optimizers(trainer)
        self._names = checkpoints.names_of(module, self.optimizers)
        if known is None:
            self.compiled = vars(module)[MARK] = self._compile(trainer, module)
        elif fitting:
            known.adopt(self.optimizers)
        self.optimizers = self.optimizers  # rebuilds Lightning's wrappers around them
        self.setup_precision_plugin()
        checkpoints.check_hyperparameters(module, getattr(trainer, "datamodule", None))

    def _known(self, module: LightningModule) -> CompiledModule | None:
        """The module as compiled by an earlier Trainer: it has only shards left."""
        known: CompiledModule | None = vars(module).get(MARK)
        for name in ("plan", "inputs"):
            if known is not None and known.options[name] != self._options[name]:
                raise InputError(
                    f"{type(module).__name__} was compiled with {name}={known.options[name]!r} and holds those shards; "
                    f"for {name}={self._options[name]!r} create a new one and load it: fit(new, ckpt_path=...)"
                )
        return known

    def _compile(self, trainer: Trainer, module: LightningModule) -> CompiledModule:
        module._device = self.root_device
        options = {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **self._options}
        parts = heavy_parts(module) if self._parts is None and not module.automatic_optimization else self._parts
        if parts is not None:
            return CompiledParts(module, self.optimizers, parts, options)
        options |= self._mixed()
        compiled = CompiledSteps(module, self.optimizers, options, self.root_device)
        example = example_of(self, trainer, self._example)
        if example is not None:
            compiled.prepare(*example)
        for path, weights in self._weights.items():
            load_weights(weights, compiled.model, under=path)
        return compiled

    def _mixed(self) -> dict[str, Any]:
        """Lightning's autocast as a `Precision`, which the search knows about."""
        plugin = self.precision_plugin
        if "precision" in self._options and type(plugin) is not LightningPrecision:
            raise InputError(
                f"precision is set twice: by the Trainer ({plugin.precision}) and by the strategy "
                f"({self._options['precision']}); set it once"
            )
        if not isinstance(plugin, MixedPrecision):
            return {}
        return {"precision": {"compute": "bfloat16" if plugin.precision == "bf16-mixed" else "float16"}}

    def model_to_device(self) -> None:
        """Shards are created on their devices."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create modules on the CPU, or with parameters on meta: a rank takes its shards of them."""
        with ExitStack() as stack:
            if empty_init:
                stack.enter_context(torch.device("meta"))
            stack.enter_context(self.precision_plugin.tensor_init_context())
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", self.precision_plugin.train_step_context, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", self.precision_plugin.val_step_context, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", self.precision_plugin.test_step_context, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", self.precision_plugin.predict_step_context, args, kwargs)

    def _step(self, name: str, context: Callable[[], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self.compiled is not None
        with nullcontext() if "precision" in self.compiled.options else context():  # else the program has it
            return self.compiled.step(name, args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients accumulate without sync until the last batch."""
        assert self.compiled is not None
        with self.compiled.no_sync():
            yield

    # -- communication -----------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which samples this rank loads: those of its data-parallel replica."""
        rank, size = self._data_place()
        return {"num_replicas": size, "rank": rank}

    def _data_place(self) -> tuple[int, int]:
        inputs = self._options["inputs"]
        if inputs != "per_replica":
            return (0, 1) if inputs == "global" else (self.global_rank, self.world_size)
        known = self.compiled.data_place() if self.compiled is not None else None
        if known is None:  # only an example is loaded: its batch size is what counts
            known = 0, count_replicas(read_source(self._options["plan"]), here().size)
        return known

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            device = self.root_device
            dist.barrier(device_ids=None if device.type == "cpu" else [device.index])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over data-parallel replicas: ranks of one replica have the same value, which counts once."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        how = reduce_op.lower() if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2].lower()
        mean, size = how in ("mean", "avg"), dist.get_world_size(group)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, "SUM" if mean else how.upper()), group=group)
        copies = size if mean else size // self._data_groups() if how == "sum" and group is None else 1
        if copies > 1:
            tensor.copy_(tensor / copies)
        return tensor

    def _data_groups(self) -> int:
        """How many replicas have their own values: what is computed from gathered samples is the same everywhere."""
        return self._data_place()[1] if self._options["inputs"] == "per_replica" else 1

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Logical and (or or) over all ranks."""
        decided = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(decided, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(decided)

    # -- state -------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.compiled is not None
        return self.compiled.model.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of this rank's shards; a checkpoint is written from the optimizer itself."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.compiled is not None
        path = Path(self.broadcast(str(filepath)))
        checkpoints.save(path, self.compiled.model, self.optimizers, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.compiled is not None and self.lightning_module is not None
        path = Path(self.broadcast(str(checkpoint_path)))
        strict = self.lightning_module.strict_loading
        return checkpoints.load(
            path, self.compiled.model, self.optimizers, strict=strict, io=self.checkpoint_io, names=self._names
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done when the checkpoint was loaded."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done when the checkpoint was loaded."""

    def teardown(self) -> None:
        """The shards stay on their devices for use after fit."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
