"""From generated files to a specialization: programs with their parameters, groups and buffers in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..capture import CapturedGraph
from ..errors import InputError
from ..layout import Mesh
from ..plan.lowering import PipelinePrograms
from ..runtime.model.program import Program, program_class
from ..runtime.model.specialization import ModelCall, RankState, Specialization
from ..runtime.pipeline import RunningPipeline
from ..runtime.world import Groups, Moment
from .call_mapping import ways_of
from .files import Generated
from .pipeline import assemble
from .replicas import count_replicas

if TYPE_CHECKING:
    from .compiler import Compiler


@dataclass(frozen=True, kw_only=True)
class ProgramLoader:
    """Loads what was generated for a call. `groups` are those of all meshes."""

    compiler: Compiler
    call: ModelCall
    captured: CapturedGraph
    state: RankState
    groups: Mapping[Mesh, Groups]

    def flat(self, file: Generated) -> Specialization:
        """A program without stages."""
        program, per_replica = file.program, self.call.passing == "per_replica"
        return Specialization(
            stage=self._program(file, next(iter(self.groups.values()))),
            path=file.path,
            per_replica=tuple(
                per_replica and name is not None and any(program.layouts[name].shards) for name in program.outputs
            ),
            **ways_of(self.captured, self.call.passing),
        )

    def pipeline(self, lowered: PipelinePrograms, generated: Sequence[Generated]) -> Specialization:
        """The programs of a pipeline that this rank runs, and what goes between them."""
        state, settings, world = self.state, self.compiler.settings, self.compiler.world

        def make(file: Generated, moment: Moment) -> Program:
            return self._program(file, self.groups[state.groups.mesh], moment)

        pipeline = assemble(lowered, generated, self.captured, state, world, make)
        joined = {output.value for output in lowered.exits if output.how == "cat"}
        replicas = count_replicas(settings.request.source, world.size) if settings.inputs == "per_replica" else 1
        if joined and replicas > 1:
            raise InputError(
                f'with inputs="per_replica" a pipeline of several data-parallel replicas returns scalars only, and the '
                f"model returns {', '.join(sorted(joined))} with rows; compute the loss in the model and pass "
                'compile=CompileOptions(outputs="scalars"), or pass inputs="global"'
            )
        here = next(file for file, place in zip(generated, pipeline.placed, strict=True) if place.stage is not None)
        per_replica = self.call.passing == "per_replica"
        return Specialization(
            running=RunningPipeline(pipeline, self.compiler.loop(state)),
            path=here.path,
            per_replica=tuple(per_replica and output.value in joined for output in self.captured.graph.outputs),
            **ways_of(self.captured, self.call.passing),
        )

    def _program(self, generated: Generated, groups: Groups, moment: Moment | None = None) -> Program:
        state, module, device = self.state, generated.module, self.compiler.world.device
        program = program_class(module)(groups, module.GROUPS, device, state.random, moment)
        program.zero = state.zero
        read = {p.name for p in generated.program.parameters}  # a loop over layers must find those of its stage
        for spec in state.specs:
            for key in spec.keys if spec.name in read else ():
                program.place(key, state.parameters[spec.name])
        for buffer in generated.program.graph.buffers:
            constant = self.captured.constants.get(buffer.value)
            tensor = state.buffers[buffer.key] if constant is None else constant.to(device)
            program.place(buffer.key, tensor, unchanging=buffer.update is None)
        skeleton = self.call.skeleton
        program.parts = {key: self.compiler.part(skeleton, call) for key, call in self.captured.opaques.items()}
        program.renew()
        return program
