"""Generated files: what runs is the text that was checked, and nothing is written where others decide."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import textwrap
import traceback
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.compile.files import generate, path_of, write
from shardwright.emit import emit
from shardwright.errors import InputError, LoweringError
from tests.emit.emitted import lowered

MLP = "mlp"


@pytest.fixture(scope="module")
def program():
    return lowered("tp=2", MLP)


def test_a_planted_pyc_is_not_executed(tmp_path, program):
    path = generate(program, tmp_path).path
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(tmp_path / 'was here')!r}, 'w')\n")
    cached = importlib.util.cache_from_source(str(path))
    py_compile.compile(str(planted), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)

    module = generate(program, tmp_path).module

    assert not (tmp_path / "was here").exists()
    assert module.PARAMETERS


def test_a_changed_file_is_written_again_and_its_text_does_not_run(tmp_path, program):
    generated = generate(program, tmp_path)
    generated.path.write_text("raise SystemExit(1)\n")

    again = generate(program, tmp_path)

    assert again.path == generated.path and again.path.read_text() == again.text == emit(program).text


def test_tracebacks_and_inspect_show_the_lines(tmp_path, program):
    generated = generate(program, tmp_path)
    model_class = next(value for value in vars(generated.module).values() if inspect.isclass(value) and
                       value.__module__ == generated.module.__name__)  # fmt: skip
    try:
        model_class.forward(None, None, None)
    except Exception as error:
        (entry,) = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(generated.path)
        ]
    assert entry.line and entry.line in generated.text
    linecache.checkcache()
    assert "def forward" in inspect.getsource(model_class)


def test_a_debugger_stops_in_generated_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pdb, sys, torch, shardwright as sw
        from torch import nn
        model = sw.parallelize(nn.Sequential(nn.Linear(4, 4)), plan="auto")
        model(torch.ones(2, 4))
        debugger = pdb.Pdb()
        debugger.set_break(str(model.generated.absolute()), next(
            number for number, line in enumerate(model.generated.read_text().splitlines(), 1) if "F.linear(" in line))
        debugger.set_trace()
        model(torch.ones(2, 4))
        print("ended")
        """)
    )
    ran = subprocess.run([sys.executable, str(script)], input="continue\nlist\np input_.shape\n"
                         "continue\nquit\n", capture_output=True, text=True, cwd=tmp_path, timeout=300)  # fmt: skip
    assert "torch.Size([2, 4])" in ran.stdout and "F.linear(" in ran.stdout and "ended" in ran.stdout, (
        ran.stdout + ran.stderr
    )


@pytest.mark.parametrize("link", ["top", "folder"])
def test_a_symbolic_link_is_refused(tmp_path, program, link):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    directory = tmp_path / "own"
    if link == "top":
        directory.symlink_to(elsewhere)
    else:
        folder = generate(program, tmp_path / "other").path.parent.name
        directory.mkdir()
        (directory / folder).symlink_to(elsewhere)

    with pytest.raises(InputError, match=r"is a symbolic link.*directory="):
        generate(program, directory)

    assert not list(elsewhere.iterdir())


def test_a_link_in_place_of_the_file_is_replaced(tmp_path, program):
    path = generate(program, tmp_path / "first").path
    target = tmp_path / "target.py"
    target.write_text("mine")
    second = tmp_path / "second" / path.parent.name / path.name
    second.parent.mkdir(parents=True)
    second.symlink_to(target)

    generate(program, tmp_path / "second")

    assert target.read_text() == "mine" and not second.is_symlink() and second.read_text() == path.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the files of other users")
def test_the_folder_of_another_user_is_refused(tmp_path, program):
    folder = generate(program, tmp_path / "first").path.parent.name
    other = tmp_path / "second" / folder
    other.mkdir(parents=True)
    os.chown(other, 12345, 12345)

    with pytest.raises(InputError, match=r"belongs to another user \(id 12345"):
        generate(program, tmp_path / "second")

    assert not list(other.iterdir()), "nothing is left there"


def test_others_may_not_write_to_the_folder(tmp_path, program):
    folder = generate(program, tmp_path / "first").path.parent.name
    own = tmp_path / "second" / folder
    own.mkdir(parents=True)
    own.chmod(0o777)

    path = generate(program, tmp_path / "second").path

    assert stat.S_IMODE(own.stat().st_mode) == 0o755
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022


def test_a_full_disk_runs_from_memory_and_says_so(tmp_path):
    """In a process of its own that may write no file, as on a disk without space."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import resource, signal, torch, shardwright as sw
        from torch import nn
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        model = sw.parallelize(nn.Sequential(nn.Linear(4, 4)), plan="auto")
        print(tuple(model(torch.ones(2, 4)).shape), model.generated.exists())
        """)
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert ran.stdout.splitlines() == ["(2, 4) False"], ran.stderr
    assert "generated code runs from memory" in ran.stderr and "CompileOptions(directory=" in ran.stderr
    assert not list((tmp_path / ".shardwright").rglob("*.part")), "nothing half-written is left"


def test_a_directory_that_is_a_file_is_an_error_of_ours(tmp_path, program):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        write("x", tmp_path / "file", program)
    with pytest.warns(UserWarning, match="runs from memory"):
        generate(program, tmp_path / "file")


@pytest.mark.parametrize("statement", ["import os", 'print("hi")', 'X_ = __import__("os").getcwd()', "class Y: pass"])
def test_the_name_of_a_plan_runs_nothing(tmp_path, program, statement):
    hostile = replace(program, plan_policy=f'x"""\n{statement}\n"""')
    with pytest.raises(LoweringError, match="can't be read back"):
        generate(hostile, tmp_path)


@pytest.mark.parametrize("policy", ["../../up", "/etc", "x" * 5000, "\0"])
def test_the_name_of_a_plan_leads_nowhere(tmp_path, program, policy):
    path = path_of("text", tmp_path, replace(program, plan_policy=policy))
    assert path.parent.parent == tmp_path
    path.parent.mkdir()


def test_a_model_runs_without_its_files(tmp_path):
    """A model whose directory vanishes keeps running, and compiles again into a new one."""
    model = sw.parallelize(
        nn.Sequential(nn.Linear(4, 4)), plan="auto", compile=sw.CompileOptions(directory=tmp_path / "d")
    )
    before = model(torch.ones(2, 4))
    shutil.rmtree(tmp_path / "d")
    assert torch.equal(model(torch.ones(2, 4)), before)
    model(torch.ones(3, 4))
    assert model.generated.exists()
