"""Words of the project's private vocabulary don't come back: docs/concepts.md has those of the field.

A word counts wherever letters don't go on: in prose, in names (`own_segment`) and in keys.
"""

import re
from pathlib import Path

from .source import SRC

ROOT = Path(__file__).parents[2]
INSTEAD = {
    r"segments?": "stage (several per rank: virtual stages)",
    r"pieces?": "shard",
    r"giver": "sender",
    r"taker": "receiver",
    r"talks?|talking|talked": "communicate",
    r"converters?": "reshard",
    r"unsaid": "defaults",
    r"fan_in|fan_out|fan_in_out|fanned": "all_reduce, replicate",
    r"seats?": "pipeline rank",
    r"wish|wishes": "request",
    r"dear|dearest": "expensive",
    r"roll_call": "all_gather_objects",
    r"comes and goes|come and go": "transient memory",
    r"goes on|go on": "continues, resumes",
    r"hands? back": "returns",
    r"an average of the weights": "EMA",
    r"heads of keys": "KV heads",
    r"is said by": "is set by",
    r"told": "a word that says who is informed, and how",
    r"(?-i:Draft)": "PlanBuilder",
    r"(?-i:Looked)": "MeshResult",
    r"(?-i:Habits)": "BackendTraits",
    r"(?-i:(?<!_)WHOLE(?!_))": "INVARIANT",
    r"roll call": "all_gather_objects",
    r"walks? through a step": "memory simulation",
    r"own policy": "custom policy",
    r"sum of its own": "separate reduction",
    r"held whole": "replicated",
    r"whole on every": "replicated on every",
}
ANY = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(INSTEAD)})(?![A-Za-z])", re.IGNORECASE)
# Not the word that is meant: an op of aten, what can be told apart, and `on` as a preposition.
IN_PASSING = re.compile(
    r"segment_reduce|told (?:apart|from)|if told to|"
    r"go(?:es)? on (?:an?|the|n|each|every|this|that|one|its|which)\b"
)
FOLDERS = ("src", "docs", "examples")
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
TEXTS += [path for folder in FOLDERS for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}")]


def private_words(text: str) -> list[tuple[int, str, str]]:
    """Lines with a private word, the word, and what to write instead."""
    text = IN_PASSING.sub(lambda match: re.sub(r"[a-z]", "_", match.group()), text)
    words = []
    for match in ANY.finditer(text):
        instead = next(word for pattern, word in INSTEAD.items() if re.fullmatch(pattern, match.group(), re.IGNORECASE))
        words.append((text.count("\n", 0, match.start()) + 1, match.group(), instead))
    return words


def test_private_words_do_not_come_back():
    faults = [
        f"{path.relative_to(ROOT)}:{line} {word!r}: {instead}"
        for path in TEXTS
        for line, word, instead in private_words(path.read_text(encoding="utf-8"))
    ]
    assert faults == []


def test_a_private_word_is_found():
    text = "own_segments = 1\n# what comes and goes\nsegmented, told apart, aten.segment_reduce\nit goes on an axis\n"
    assert [(line, word) for line, word, _ in private_words(text)] == [(1, "segments"), (2, "comes and goes")]
    assert SRC.is_relative_to(ROOT)
