"""One run on several nodes, one fault at a random step, and what has to be true afterwards.

    fault            what is done                                        how the run has to end
    kill rank        SIGKILL of a worker                                 started again by torchrun, to the end
    stop rank        SIGSTOP for some seconds                            to the end
    cut link         a node's link is down for some seconds              to the end
    lose link        a node's link is down for good                      with an error on every node
    kill agent       SIGKILL of a node's torchrun                        with an error on every node
    replace agent    the same, and a new torchrun on that node soon      to the end, or with an error on every node
    fill disk        no space is left where checkpoints are saved        with an error on every node

However it ends, no process is left behind, every checkpoint is whole, and the run, started once more if it has not come
to its end, has the losses and parameters of the run that nobody disturbed. One that runs past the limit hangs. Where a
link is lost, it is ranks that have to end: torchrun itself waits without a deadline for a store that it can't reach.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwright.checkpoint import checkpoints_in, verify
from shardwright.errors import CheckpointError
from tests.namespaces import Nodes
from tests.train.lives import losses_in
from tests.train.runs import by_hand, close

ROOT = Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH = 3, 3
STEPS = EPOCHS * STEPS_PER_EPOCH
TIMEOUT = 25.0  # seconds that ranks wait for each other
LIMIT = 240.0  # seconds in which a run ends after its fault
QUIET = 10.0  # seconds after which an agent starts no more ranks
START = 240.0  # seconds in which it begins, on a busy machine
PLANS = ("dp=2", "tp=2", "zero3=2", "pp=2")
MUST_FINISH = ("kill rank", "stop rank", "cut link")
MAY_FAIL = ("lose link", "kill agent", "replace agent", "fill disk")
FAULTS = (*MUST_FINISH, *MAY_FAIL)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault, on a node, at a step, under a plan."""

    seed: int
    fault: str
    plan: str
    node: int
    step: int
    seconds: float

    @staticmethod
    def drawn(seed: int, nodes: int, faults: tuple[str, ...] = FAULTS) -> Trial:
        chance = random.Random(seed)
        return Trial(
            seed=seed, fault=faults[seed % len(faults)], plan=chance.choice(PLANS).replace("2", str(nodes)),
            node=chance.randrange(nodes), step=chance.randint(1, STEPS - 3), seconds=chance.uniform(1.0, 4.0),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.fault} on node {self.node} at step {self.step}, {self.plan}"


@dataclass(kw_only=True)
class Outcome:
    """How a run ended, and what should not be so."""

    trial: Trial
    finished: bool = False
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


class Launch:
    """The agents of a run, one on each node, with their output in files."""

    def __init__(self, nodes: Nodes, folder: Path, trial: Trial, name: str) -> None:
        self.nodes, self.folder, self.trial, self.name = nodes, folder, trial, name
        self.mark = f"{os.getpid()}-{trial.seed}-{name}"
        self.agents = [self.start(number) for number in range(len(nodes.names))]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        count = len(self.nodes.names)
        host = "true" if number == 0 else "false"  # torchrun knows no address of a namespace as its own
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", "1",
            "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.nodes.address(0)}:29400",
            "--rdzv-id", self.name, "--rdzv-conf",
            f"is_host={host},join_timeout=60,last_call_timeout=1,read_timeout=30", "--local-addr",
            self.nodes.address(number), "--monitor-interval", "0.2", "-m", "tests.node_faults.job", str(self.folder),
            self.trial.plan, str(STEPS), str(TIMEOUT),
        ]  # fmt: skip
        variables = {
            "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
            "NODE_FAULTS": f"{self.mark} {number}",
        }  # fmt: skip
        with self.output(number).open("ab") as out:
            return subprocess.Popen(
                [*self.nodes.within(number), *torchrun], cwd=ROOT, env={**os.environ, **variables}, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip

    def output(self, number: int) -> Path:
        return self.folder.parent / f"{self.name}-node{number}.txt"

    def processes(self, number: int | None = None, *, ranks: bool = False) -> list[int]:
        """The processes of the run, or of one node; of these only the ranks."""
        wanted = f"NODE_FAULTS={self.mark}" + ("" if number is None else f" {number}\0")
        numbers = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    text = (entry / "environ").read_text(errors="replace")
                    if wanted in text and (not ranks or "\0LOCAL_RANK=" in text) and (entry / "cmdline").read_text():
                        numbers.append(int(entry.name))
        return numbers

    def wait_for_step(self, step: int) -> bool:
        """Whether the run got there before it ended."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self.agents):
            with suppress(OSError, ValueError):
                if int((self.folder / "step").read_text()) >= step:
                    return True
            time.sleep(0.05)
        return False

    def wait_for_ranks(self, seconds: float) -> bool:
        """Whether all ranks ended in time, and no agent has started others."""
        deadline, since = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < QUIET:
            time.sleep(0.5)
            since = time.monotonic() if self.processes(ranks=True) else since
        return not self.processes(ranks=True)

    def wait(self, seconds: float) -> bool:
        """Whether all agents ended in time."""
        deadline = time.monotonic() + seconds
        for agent in self.agents:
            try:
                agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def end(self) -> None:
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for agent in self.agents:
            agent.wait(30)


def try_fault(nodes: Nodes, trial: Trial, folder: Path) -> Outcome:
    """Run, disturb, and look at what is left."""
    begin, outcome = time.monotonic(), Outcome(trial=trial)
    with small_disk(folder / "shared") as shared:
        launch = Launch(nodes, shared, trial, "first")
        try:
            if not launch.wait_for_step(trial.step):
                outcome.faults.append("the run did not get to the step of the fault")
            else:
                do(trial, launch)
                _look(launch, outcome)
        finally:
            nodes.mend(trial.node)
            launch.end()
        _relaunch(nodes, trial, shared, outcome)
    outcome.seconds = time.monotonic() - begin
    return outcome


def do(trial: Trial, launch: Launch) -> None:
    """The fault."""
    ranks = launch.processes(trial.node, ranks=True)
    if trial.fault == "kill rank":
        _send(ranks, signal.SIGKILL)
    elif trial.fault == "stop rank":
        _send(ranks, signal.SIGSTOP)
        time.sleep(trial.seconds)
        _send(ranks, signal.SIGCONT)
    elif trial.fault == "cut link":
        launch.nodes.cut(trial.node)
        time.sleep(trial.seconds)
        launch.nodes.mend(trial.node)
    elif trial.fault == "lose link":
        launch.nodes.cut(trial.node)
    elif trial.fault in ("kill agent", "replace agent"):
        agent = launch.agents[trial.node]
        agent.kill()
        agent.wait()
        if trial.fault == "replace agent":
            time.sleep(trial.seconds)
            launch.agents[trial.node] = launch.start(trial.node)
    elif trial.fault == "fill disk":
        with suppress(OSError), (launch.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))


def _look(launch: Launch, outcome: Outcome) -> None:
    """How the disturbed run ended."""
    trial, lost = launch.trial, launch.trial.fault == "lose link"
    if not (launch.wait_for_ranks(LIMIT) if lost else launch.wait(LIMIT)):
        outcome.faults.append(f"it did not end within {LIMIT:.0f} s of its fault")
        return
    deadline = time.monotonic() + 20.0  # ranks notice that their agent is gone
    while launch.processes(ranks=lost) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left := launch.processes(ranks=lost):
        outcome.faults.append(f"processes {left} are left behind")
    outcome.finished = (launch.folder / "values.pt").exists()
    if not outcome.finished and trial.fault in MUST_FINISH:
        outcome.faults.append("it did not come to its end")
    for number in range(len(launch.nodes.names)) if not outcome.finished else ():
        if "shardwright.errors." not in launch.output(number).read_text(errors="replace"):
            outcome.faults.append(f"node {number} ended without an error of shardwright")


def _relaunch(nodes: Nodes, trial: Trial, shared: Path, outcome: Outcome) -> None:
    """Start what has not come to its end once more, and compare it with the undisturbed run."""
    (shared / "filler").unlink(missing_ok=True)
    try:
        for path in checkpoints_in(shared / "run/checkpoints"):
            verify(path)
    except CheckpointError as error:
        outcome.faults.append(f"a checkpoint is damaged: {error}")
    if not (shared / "values.pt").exists():
        launch = Launch(nodes, shared, trial, "second")
        try:
            if not launch.wait(LIMIT + START) or any(agent.returncode for agent in launch.agents):
                outcome.faults.append("started once more, it does not come to its end")
                return
        finally:
            launch.end()
    losses, values = by_hand(EPOCHS)
    try:
        close(dict(losses_in(shared / "losses")), losses)
        close(torch.load(shared / "values.pt"), values)
    except AssertionError as error:
        outcome.faults.append(f"it differs from the undisturbed run: {error}")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder with 16 MiB of space."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True, timeout=30)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def _send(numbers: list[int], sent: signal.Signals) -> None:
    for number in numbers:
        with suppress(ProcessLookupError):
            os.kill(number, sent)
