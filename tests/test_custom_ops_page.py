"""What docs/custom_ops.md shows runs as it stands, and so does its example."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile looks at it


def test_the_page_runs(capsys, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "custom_ops.md").read_text(), re.DOTALL)
    assert len(blocks) >= 7
    page = tmp_path / "custom_ops_page.py"
    page.write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    __import__("custom_ops_page")
    assert "is wrong: split on d over 2 the result is off by" in capsys.readouterr().out


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "custom_op.py"), run_name="__main__")
    assert "a rule found by probing" in capsys.readouterr().out
