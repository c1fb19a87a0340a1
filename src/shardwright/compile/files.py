"""Generated text, and its files on disk: by content, so that nothing stale is reused."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..capture import ImportedFunction, without_collection
from ..emit import emit
from ..ir import Graph
from ..layout import Layout
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.lowering import lower
from ..probe import probing
from ..rules import Analysis, analyse
from ..runtime.model.program import load_file


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A program, its file, and that file imported."""

    program: LoweredProgram
    path: Path
    module: ModuleType


def generate(program: LoweredProgram, directory: Path, text: str | None = None) -> Generated:
    """Write the text of a program, and import it."""
    path = write(emit(program).text if text is None else text, directory, program)
    name = f"shardwright_generated_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return Generated(program=program, path=path, module=load_file(path, name))


def write(text: str, directory: Path, program: LoweredProgram) -> Path:
    """Write a generated file under a name that says what it is; the same content has the same name."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    folder = directory / f"{program.graph.name}-{program.plan_policy.replace('=', '').replace(',', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    what = "_".join(part for part in (program.graph.entry.replace("-", "_"), program.title.replace(" ", "")) if part)
    path = folder / f"{what}_{digest}.py"
    if not path.exists() or path.read_text() != text:
        builder = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")  # ranks may be threads
        builder.write_text(text)
        builder.replace(path)
    return path


def compile_graph(
    graph: Graph,
    make_plan: Callable[[Analysis], Plan],
    *,
    storage_options: Mapping[str, Layout] | None = None,
    mode: str = "global",
    functions: Mapping[str, ImportedFunction] | None = None,
) -> tuple[Plan, LoweredProgram, str]:
    """Everything after capture: atoms, plan, lowering, text. `functions` are the user's, which may be probed."""
    with without_collection():
        analysis = analyse(graph, probing(functions))
        plan = make_plan(analysis)
        program = lower(graph, plan, analysis, storage_options=storage_options, mode=mode)
        return plan, program, emit(program).text
