"""A foreign configuration in our settings: each of its keys is mapped, does not apply here, or is refused.

None is passed over in silence. A `Reading` collects what became of the keys; its end is a `Translation`, or one
ConfigError with all that is refused. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import ConfigError
from meshwright.secrets import HIDDEN, is_secret_variable
from meshwright.strategy import AUTO, DEGREES, Strategy

if TYPE_CHECKING:
    from meshwright.config import RunConfig

STRATEGY = "parallel.strategy"
UNREAD = "has no part in anything beside the other keys of this file; leave it out"
UNKNOWN = "follows from the number of ranks, which is not known before they have met (--nproc auto, --nodes MIN:MAX)"


@dataclass(frozen=True)
class Around:
    """What is known beside a foreign file."""

    config: RunConfig
    """The settings from elsewhere."""
    ranks: int | None = None
    """How many there will be; None where the strategy says how many."""
    settled: bool = False
    """Whether the command line has the strategy, whatever files say."""
    unknown: bool = False
    """Whether nobody knows how many ranks there will be before they have met."""

    def data_ranks(self, words: Mapping[str, str]) -> int:
        """How many ranks work on other samples than the rest, where a foreign file has these words of the strategy."""
        given = self.config.parallel.strategy.split()
        written = dict(word.partition("=")[::2] for word in given if "=" in word and not {"<", ">", "!"} & set(word))
        degrees = written if self.settled else {**written, **words}
        every = " ".join(f"{name}={value}" for name, value in degrees.items() if name in DEGREES or name == "zero")
        others = " ".join(f"{name}={value}" for name, value in degrees.items() if name in ("tp", "pp", "cp"))
        return max(1, (self.ranks or Strategy.fewest_processes(every)) // Strategy.fewest_processes(others))


@dataclass(frozen=True)
class Entry:
    """What became of one foreign key."""

    key: str
    given: str
    """Its value, as text; empty where the file leaves it out and the other trainer has a default."""
    verdict: Literal["mapped", "not applicable"]
    ours: str
    """The setting and its value, as people type it."""
    note: str = ""


@dataclass(frozen=True)
class Translation:
    """A foreign configuration as settings of ours, and what became of each of its keys."""

    dialect: str
    file: str
    entries: tuple[Entry, ...]
    stated: Mapping[str, Any]
    """Settings that the file asks for."""
    assumed: Mapping[str, Any]
    """Settings that follow from what the other trainer does where the file is silent; a run file may change them."""
    keys: Mapping[str, tuple[str, ...]]
    """For each setting, the foreign keys that it comes from."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Of the strategy: what the file asks for."""
    merged: tuple[str, ...] = (STRATEGY,)
    """Settings that hold what the run file says, too."""

    def origin(self, setting: str) -> str:
        """Where a setting comes from, in words."""
        keys = ", ".join(dict.fromkeys(self.keys.get(setting, ())))
        return f"{self.dialect}: {keys}" if keys else self.dialect


@dataclass
class Reading:
    """What is known so far of a foreign configuration."""

    dialect: str
    file: str
    entries: list[Entry] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    stated: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    left_to_us: set[str] = field(default_factory=set)
    """Keys that the file leaves to the trainer: nothing is assumed for them."""
    given: set[str] = field(default_factory=set)
    """Keys that the file has."""
    answered: set[str] = field(default_factory=set)
    """Keys of which something was said."""

    def map(self, key: str, given: Any, setting: str, value: Any, note: str = "") -> None:
        """The key asks for a setting."""
        self.answered.add(key)
        if setting in self.stated and self.stated[setting] != value:
            first = self.keys[setting][0]
            self.refuse(key, f"says {setting}={shown(value)} and {first} says {shown(self.stated[setting])}")
            return
        self.stated[setting] = value
        self.keys.setdefault(setting, []).append(key)
        self.entries.append(Entry(key, shown(given), "mapped", f"{setting}={shown(value)}", note))

    def assume(self, key: str, setting: str, value: Any, note: str) -> None:
        """The file leaves a key out for which the other trainer has a value of its own."""
        if key in self.left_to_us:
            return
        self.assumed[setting] = value
        self.keys.setdefault(setting, []).append(key)
        self.entries.append(Entry(key, "", "mapped", f"{setting}={shown(value)}", note))

    def word(self, key: str, given: Any, name: str, value: Any, note: str = "") -> None:
        """The key asks for a part of the strategy."""
        self.answered.add(key)
        text = str(value)
        if self.words.setdefault(name, text) != text:
            self.refuse(key, f"asks for {name}={text}, and another key for {name}={self.words[name]}")
            return
        self.keys.setdefault(STRATEGY, []).append(key)
        self.entries.append(Entry(key, shown(given), "mapped", f"{STRATEGY}: {name}={text}", note))

    def leave(self, key: str, given: Any, reason: str) -> None:
        """The key does not apply here."""
        self.answered.add(key)
        text = HIDDEN if is_secret_variable(key.rpartition(".")[2]) else shown(given)
        self.entries.append(Entry(key, text, "not applicable", "", reason))

    def refuse(self, key: str, reason: str) -> None:
        """The key asks for what is not done."""
        self.answered.add(key)
        self.refusals.append(f"{key} {reason}")

    def finish(self, around: Around) -> Translation:
        """The translation, with the strategy laid over the one that the run file has; raises what was refused."""
        stated = dict(self.stated)
        if self.words and not around.settled:
            stated[STRATEGY] = self._merged(around.config.parallel.strategy)
        if not self.refusals:
            # A refusal may leave keys that go with it unread; without one, all must have been read.
            for key in sorted(self.given - self.answered):
                self.refuse(key, UNREAD)
        if self.refusals:
            raise ConfigError(f"{self.file} ({self.dialect}):\n  " + "\n  ".join(self.refusals))
        keys = {setting: tuple(found) for setting, found in self.keys.items()}
        return Translation(self.dialect, self.file, tuple(self.entries), stated, self.assumed, keys, self.words)

    def _merged(self, base: str) -> str:
        """The words of the file and those of a strategy that stands in the run file."""
        written = dict(word.partition("=")[::2] for word in base.split() if word != AUTO)
        for name in written.keys() & self.words.keys():
            if written[name] != self.words[name]:
                asked = f"{name}={self.words[name]}"
                self.refuse(
                    STRATEGY, f"is '{base}' in the run file, and this file asks for {asked}; change one of them"
                )
        auto = [AUTO] if base.split()[:1] == [AUTO] and len(base.split()) > 1 else []
        kept = [word for word in base.split() if word != AUTO and word.partition("=")[0] not in self.words]
        return " ".join([*auto, *kept, *(f"{name}={value}" for name, value in self.words.items())])


def shown(value: Any) -> str:
    """A value as people type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)
