"""The compiled program on one rank, trained like the original, with everything gathered for the comparison.

Ranks that are threads share one capture: torch.export is not thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..capture import CapturedGraph, copy_module
from ..compile import Compiler, CompilerSettings
from ..plan.request import PlanRequest
from ..runtime.model.access import state_of
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.model.specialization import ModelCall, RankState
from ..runtime.parameters.full_tensors import gather_tensor
from ..runtime.parameters.sharded import ShardedParameter, keeps_share, raw_gradient
from ..runtime.parameters.state_dicts import spread_out
from ..runtime.world import start
from ..storage import ParameterSpec, storage_layout
from .run import Entry, Tensors, VerifyTask, first_names, trainable

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class CompileTask:
    """How a task is compiled. `captures`, by (training, which program), is shared by all ranks of a process."""

    task: VerifyTask
    request: PlanRequest
    directory: Path
    captures: dict[tuple[bool, int], CapturedGraph] = field(default_factory=dict)


class SharingCompiler(Compiler):
    """A compiler that captures once for all ranks of a process."""

    captures: dict[tuple[bool, int], CapturedGraph]

    def _capture(self, call: ModelCall) -> CapturedGraph:
        key = (call.training, len(self.programs))
        with _ONE_AT_A_TIME:
            if key not in self.captures:
                self.captures[key] = super()._capture(call)
            return self.captures[key]


class CompiledSide:
    """The compiled model on this rank."""

    def __init__(self, order: CompileTask) -> None:
        task = order.task
        self.task = task
        module = copy_module(task.module)
        if "train" in task.entries and not module.training:
            module.train()
        self.first = first_names(module)
        self.optimizer = task.optimizer(trainable(module.parameters()))
        settings = CompilerSettings(
            request=order.request, directory=order.directory, seed=task.seed, precision=task.precision,
            promote=task.promote, exact_random=True, outputs=task.outputs,
        )  # fmt: skip
        compiler = SharingCompiler(module, self.optimizer, start(), settings)
        compiler.captures = order.captures
        self.model = ParallelModel(compiler)
        if "train" not in task.entries:
            self.model.eval()
        self.model.prepare(task.args, task.kwargs)

    @property
    def holding(self) -> RankState:
        return state_of(self.model)

    def forward(self, entry: Entry) -> Any:
        if entry == "eval":
            self.model.eval()
        return self.model(*self.task.args, **self.task.kwargs)

    def gradients(self) -> Tensors:
        own = {spec.name: self._gradient(spec) for spec in self.holding.specs if spec.trainable}
        every = [spec for _, specs in self.holding.pp_ranks for spec in specs]
        whole = spread_out(own, self.holding.pp_ranks)
        return {self.first[spec.name]: whole[spec.name] for spec in every if spec.trainable}

    def _gradient(self, spec: ParameterSpec) -> Tensor | None:
        groups = self.holding.groups
        parameter: ShardedParameter = self.holding.parameters[spec.name]
        local = raw_gradient(parameter)
        if local is None and keeps_share(parameter) and parameter.shard is not None:
            local = raw_gradient(parameter.shard)
        if local is None:
            return None
        layout = storage_layout(spec, groups.mesh.sizes) if spec.storage.shards_gradient else None
        return gather_tensor(local, spec, groups, layout)

    def parameters(self) -> Tensors:
        state = self.model.full_state_dict()
        return {key: state[key] for key, first in self.first.items() if key == first}

    def buffers(self) -> Tensors:
        return {key: buffer.detach().clone() for key, buffer in self.holding.buffers.items()}
