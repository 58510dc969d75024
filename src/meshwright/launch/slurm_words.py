"""What sbatch takes as a limit, a size, a name; everything else is refused here, by its option. No torch.

Names and features are asked of the cluster only when a job is submitted, so here is what any of them can be made of.
"""

from __future__ import annotations

import re

from meshwright.errors import ConfigError

MOST_GRACE_S = 65_535
_NAME = r"\w[\w.@:+-]*"
_FORMS = {
    "--partition": (rf"{_NAME}(?:,{_NAME})*", "a name, or several with commas"),
    "--account": (_NAME, "a name"),
    "--qos": (rf"{_NAME}(?:,{_NAME})*", "a name"),
    "--time": (
        r"\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}|(?i:unlimited|infinite)",
        "minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 24:00:00, or UNLIMITED",
    ),
    "--mem": (r"\d+(?i:[KMGT]B?)?", "a whole number with K, M, G or T, such as 900G"),
    "--constraint": (r"[\w.,:=/@%+&|*()\[\]-]+", "features, such as a100, a&b or [rack1|rack2]"),
}


def taken(option: str, word: str) -> str:
    """The word itself, so that what was checked is what is written."""
    form, told = _FORMS[option]
    if not re.fullmatch(form, word, re.ASCII):
        raise ConfigError(f"{option} {word!r} is nothing that sbatch takes: it is {told}")
    return word


def number(option: str, value: int, least: int, most: int | None = None) -> int:
    """The number itself."""
    if value < least or (most is not None and value > most):
        most_too = f" to {most}" if most is not None else ""
        raise ConfigError(f"{option} {value} is nothing that sbatch takes: it is a number from {least}{most_too}")
    return value


def own_option(word: str) -> str:
    """An option that was given as a whole, and ends where its line does."""
    if not re.fullmatch(r"--?[\w-]+(?:[= ].*)?", word) or not word.isprintable():
        raise ConfigError(f"--sbatch {word!r} is not an option of sbatch, such as --sbatch=--reservation=night")
    return word


def folder_name(told: str, path: str) -> str:
    """A folder's name, which stands in quotes where it has spaces."""
    if set('%"\\') & set(path) or not path.isprintable():
        raise ConfigError(f"{told} has a name that sbatch cannot take: {path!r}")
    return path
