"""The parser of all commands: argparse, which in addition says what a misspelt word probably meant."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import meant

_CHOICE = re.compile(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """Options are not abbreviated, since an abbreviation may become ambiguous; a near miss is answered instead."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", NarrowHelp)
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """A command refuses what it doesn't know itself, because it knows what it has."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            words = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            faults = [f"there is no option {word}{meant(word, known)}" for word in words]
            self.error("\n".join(faults) if faults else f"too many arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        refused = _CHOICE.fullmatch(message)
        if refused:
            choices = re.findall(r"'([^']*)'", refused[3])
            is_option = refused[1].startswith("-")
            what = f"{refused[2]!r} is no choice for" if is_option else f"there is no {refused[2]!r} as"
            message = f"{what} {refused[1]}" + (meant(refused[2], choices) or f"; there are {', '.join(choices)}")
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists what there is\n")


class NarrowHelp(argparse.HelpFormatter):
    """Helps in at most 80 columns, one line for most options."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns - 2, 79))

    def add_argument(self, action: argparse.Action) -> None:
        """Commands are indented, which argparse forgets to count."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment
