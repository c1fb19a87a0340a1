"""Nodes on one machine: network namespaces with a switch between them, whose links can be cut and mended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class UnavailableError(Exception):
    """Network namespaces can't be made here."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Namespaces with an interface eth0 each, and one more with the switch."""

    names: tuple[str, ...]
    switch: str

    def address(self, number: int) -> str:
        return f"10.97.0.{number + 1}"

    def within(self, number: int) -> list[str]:
        """What a command begins with that runs on a node."""
        return ["ip", "netns", "exec", self.names[number]]

    def cut(self, number: int) -> None:
        """Nothing arrives any more, and nobody is told: the interface of the node keeps its address."""
        run(*self._port(number), "nomaster")

    def mend(self, number: int) -> None:
        run(*self._port(number), "master", "bridge0")

    def _port(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.switch, "ip", "link", "set", f"port{number}"]


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@contextmanager
def made_nodes(count: int) -> Iterator[Nodes]:
    """Namespaces of this process; UnavailableError where they can't be made."""
    nodes = Nodes(names=tuple(f"sw{os.getpid()}n{number}" for number in range(count)), switch=f"sw{os.getpid()}s")
    names: list[str] = []
    try:
        try:
            for name in (nodes.switch, *nodes.names):
                run("ip", "netns", "add", name)
                names.append(name)
            _connect(nodes)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UnavailableError(f"network namespaces can't be made here: {error}") from error
        yield nodes
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _connect(nodes: Nodes) -> None:
    run("ip", "-n", nodes.switch, "link", "add", "bridge0", "type", "bridge")
    run("ip", "-n", nodes.switch, "link", "set", "bridge0", "up")
    for number, name in enumerate(nodes.names):
        port = f"port{number}"
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", nodes.switch)
        run("ip", "-n", nodes.switch, "link", "set", port, "master", "bridge0", "up")
        run("ip", "-n", name, "addr", "add", f"{nodes.address(number)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
