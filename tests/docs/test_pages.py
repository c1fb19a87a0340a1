"""The Python in the pages of docs/ runs as it stands there, from top to bottom."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "checkpoints.md",
    "chunked_loss.md",
    "clusters.md",
    "constraints.md",
    "cost-model.md",
    "control_flow_and_opaque.md",
    "data.md",
    "experts.md",
    "gradients.md",
    "precision.md",
    "rehearse.md",
    "report.md",
    "training.md",
    "troubleshooting.md",
    "faults.md",
    "huggingface.md",
    "launching.md",
    "lightning.md",
    "methods.md",
    "eight_gpus.md",
    "wrong_gradients.md",
    "policies.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own cond says it
@pytest.mark.filterwarnings(r"ignore:::lightning\..*")  # about workers, and of torch's that it uses
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        above = text[: block.start(1)].count("\n")  # so that an error shows the line of the page
        exec(compile("\n" * above + block[1], str(DOCS / page), "exec"), namespace)
