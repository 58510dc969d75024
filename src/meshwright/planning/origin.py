"""Where the numbers of a plan come from, in words. No torch."""

from __future__ import annotations

from meshwright.planning.measured import Measured, operations_of
from meshwright.planning.measured_links import MeasuredLinks
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout


def origin(question: Question) -> str:
    """Whether the numbers are measured, calibrated or estimated."""
    cluster = question.cluster
    operations = operations_of(question.scenario(Layout(), 1), question.known)
    lines = str(operations.links) if isinstance(operations.links, MeasuredLinks) else ""
    if isinstance(operations, Measured):
        if cluster.chip.key == "cpu":
            return f"times {cluster.measured}; memory estimated"
        links = "links too" if cluster.speeds is not None and cluster.speeds.collectives else "links estimated"
        return f"times of computing {cluster.measured}; {lines or links}, memory estimated"
    ignored = f"; {cluster.measured}" if cluster.measured and cluster.speeds is None else ""
    return _estimated(question) + (f"; {lines}" if lines else "") + ignored


def _estimated(question: Question) -> str:
    unknown = [group.chip.name for group in question.cluster.kinds if not question.known.measured(group.chip.key)]
    if not unknown:
        these = "these chips" if question.cluster.groups else "this chip"
        return f"estimated, with constants fitted to published runs on {these}"
    which = "this chip" if not question.cluster.groups else ", ".join(dict.fromkeys(unknown))
    return f"estimated from the vendor's figures; nothing was measured on {which}"
