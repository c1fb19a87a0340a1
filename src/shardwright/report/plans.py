"""Read a plan file without its model."""

from __future__ import annotations

from pathlib import Path

from ..errors import PlanError
from ..formats import read_json
from ..plan import Plan, PlanStage
from ..plan.file import mesh_of, read_storage, validated


def read_plan(path: str | Path) -> Plan:
    """A plan as it is in the file, with starred names: to show, not to lower."""
    data = validated(read_json(path, PlanError), path)
    entries = {
        entry: tuple(
            PlanStage(
                mesh=mesh_of(data, stage),
                choices={
                    **stage["choices"],
                    **{name: {} for name in stage.get("ops", ()) if name not in stage["choices"]},
                },
                recompute=tuple(stage["recompute"]),
                chunked_loss=stage.get("chunked_loss", {}),
                listed=tuple(stage.get("ops", ())),
            )
            for stage in stages
        )
        for entry, stages in data["entries"].items()
    }
    if not entries:
        raise PlanError(f"{path} has no entries, so it decides nothing")
    return Plan(
        model=data["model"], policy=data["policy"], cluster=data["cluster"], fingerprints=data["fingerprints"],
        entries=entries, storage=read_storage(data["storage"], path),
        microbatches=data["microbatches"],
        schedule=data.get("schedule", ""), steps=data.get("steps"), local=data.get("local", False),
        batch_norm=data.get("batch_norm", "global"),
        notes=tuple(data["notes"]), predicted=data["predicted"],
        as_read=True,
    )  # fmt: skip
