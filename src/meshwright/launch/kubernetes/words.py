"""What Kubernetes takes as a name, a label, a quantity or an image; everything else is refused here, by its option.

Each function gives the word itself, so that what was checked is what is written.
"""

from __future__ import annotations

import math
import posixpath
import re

from meshwright.errors import ConfigError

NAME_LENGTH = 40
"""Letters of a run's name: operators add to it, and what they make of it is a DNS label, 63 letters at most."""

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME_PART = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_SECRET_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_QUANTITY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<suffix>m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_BYTES = {"": 1} | {
    f"{letter}{binary}": base**power
    for binary, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGTPE" if binary else "kMGTPE", start=1)
}
_HOST = r"(?:[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?)(?:\.[a-zA-Z0-9](?:[-a-zA-Z0-9]*[a-zA-Z0-9])?)*(?::\d{1,5})?"
_PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_HOST}/)?{_PATH}(?:/{_PATH})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def run_name(option: str, word: str) -> str:
    """A name for objects that operators make others from; that of a Service, among them, begins with a letter."""
    if len(word) > NAME_LENGTH or not _NAME.fullmatch(word):
        raise ConfigError(
            f"{option} {word}: Kubernetes takes small letters, digits and dashes, a letter first, and {NAME_LENGTH} of "
            "them at most, since operators add to it"
        )
    return word


def label(option: str, word: str) -> str:
    """A DNS label, such as a namespace or a volume's name."""
    if len(word) > 63 or not _LABEL.fullmatch(word):
        raise ConfigError(
            f"{option} {word}: a name has small letters, digits and dashes, 63 at most, no dash at an end"
        )
    return word


def object_name(option: str, word: str) -> str:
    """The name of an object that is there: a claim, a secret, an account, a queue."""
    if len(word) > 253 or not _SUBDOMAIN.fullmatch(word):
        raise ConfigError(f"{option} {word}: '{word}' is no name of an object (small letters, digits, dashes, dots)")
    return word


def label_key(option: str, word: str) -> str:
    """The key of a label, a taint or a resource, such as nvidia.com/gpu."""
    prefix, slash, name = word.rpartition("/")
    if (slash and not _SUBDOMAIN.fullmatch(prefix)) or len(name) > 63 or not _NAME_PART.fullmatch(name):
        raise ConfigError(f"{option}: '{word}' is no key of a label; one looks like topology.kubernetes.io/zone")
    return word


def resource(option: str, word: str) -> str:
    """The name of devices that nodes have, which always has a domain."""
    if "/" not in word:
        raise ConfigError(f"{option}: '{word}' is no resource of devices; one has a domain, as nvidia.com/gpu has")
    return label_key(option, word)


def label_value(option: str, word: str) -> str:
    """The value of a label or a taint; may be empty."""
    if len(word) > 63 or (word and not _NAME_PART.fullmatch(word)):
        raise ConfigError(f"{option}: '{word}' is no value of a label: letters, digits, dashes, dots, 63 at most")
    return word


def queue(option: str, word: str) -> str:
    """The name of a queue, which is a label's value, too."""
    return label_value(option, object_name(option, word))


def secret_key(option: str, word: str) -> str:
    """A key within a Secret."""
    if not _SECRET_KEY.fullmatch(word):
        raise ConfigError(f"{option}: '{word}' is no key of a Secret: letters, digits, dashes, dots, underscores")
    return word


def cpu(option: str, word: str) -> str:
    """A number of cores, such as 32 or 500m."""
    found = _QUANTITY.fullmatch(word)
    if found is None or found["suffix"] not in (None, "m") or float(found["number"]) == 0:
        raise ConfigError(f"{option} {word}: cores are a number such as 32, or thousandths such as 500m")
    return word


def memory(option: str, word: str) -> str:
    """An amount of memory, such as 512Gi."""
    found = _QUANTITY.fullmatch(word)
    if found is None or found["suffix"] == "m" or float(found["number"]) == 0:
        raise ConfigError(f"{option} {word}: memory is a number with Ki, Mi, Gi, Ti (or k, M, G, T), such as 512Gi")
    return word


def in_bytes(quantity: str) -> float:
    """What a memory quantity is."""
    found = _QUANTITY.fullmatch(quantity)
    assert found is not None
    return float(found["number"]) * _BYTES[found["suffix"] or ""]


def whole_cores(quantity: str) -> int:
    """How many cores Ray counts where a pod has so many: parts of one are a whole one to KubeRay."""
    found = _QUANTITY.fullmatch(quantity)
    assert found is not None
    return math.ceil(float(found["number"]) / (1000 if found["suffix"] == "m" else 1))


def image(option: str, word: str) -> str:
    """A reference of a container image."""
    if not _IMAGE.fullmatch(word):
        raise ConfigError(
            f"{option} '{word}' is no image reference; one looks like registry.example.com/team/meshwright:1.2, or "
            "ends with @sha256: and 64 digits"
        )
    return word


def folder(option: str, word: str) -> str:
    """An absolute path within a container."""
    if not word.startswith("/") or word == "/" or posixpath.normpath(word) != word or ":" in word:
        raise ConfigError(f"{option}: '{word}' must be an absolute path such as /data, without .., colon or last slash")
    return word
