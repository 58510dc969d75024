"""The parts of a step are told apart by everyone: each has a colour of its own, in light and dark, and a texture helps
where colours come close for eyes that miss one kind of cones."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from meshwright.observe.web.assets import asset

Colour = tuple[float, float, float]
EYES = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no long cones": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.0520)),
    "no middle cones": ((0.3673, 0.8606, -0.2280), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9689)),
    "no short cones": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
"""What becomes of linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""
APART = 0.1
"""A distance in Oklab that is seen without looking for it."""


def times(matrix: tuple[Colour, Colour, Colour], colour: Colour) -> Colour:
    red, green, blue = (sum(one * other for one, other in zip(row, colour, strict=True)) for row in matrix)
    return red, green, blue


def oklab(text: str, eyes: str) -> Colour:
    """A colour such as #2f6bd0 as these eyes see it, in a space where distances are what they look like."""
    shares = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in shares)
    seen = [min(1.0, max(0.0, one)) for one in times(EYES[eyes], (red, green, blue))]
    cones = times(
        ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300)), (seen[0], seen[1], seen[2])
    )
    roots = tuple(one ** (1 / 3) for one in cones)
    return times(
        ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087)),
        (roots[0], roots[1], roots[2]),
    )


def distance(one: str, other: str, eyes: str) -> float:
    pairs = zip(oklab(one, eyes), oklab(other, eyes), strict=True)
    return float(sum((here - there) ** 2 for here, there in pairs) ** 0.5)


def parts() -> dict[str, tuple[str, str, str]]:
    """For each part of a step: its light colour, its dark one, its texture."""
    script, style = asset("parts.js"), asset("page.css")
    block = re.search(r"export const PARTS = \{(.*?)\n\};", script, re.DOTALL)
    assert block is not None
    found = {}
    for name, texture in re.findall(r'^\s*(\w+): \{[^}]*texture: (null|"\w+")', block[1], re.MULTILINE):
        colours = re.search(
            rf"^\.part-{name} \{{ --part: light-dark\((#\w{{6}}), (#\w{{6}})\); }}$", style, re.MULTILINE
        )
        assert colours is not None, f"{name} has no colour"
        found[name] = (colours[1], colours[2], texture)
    assert len(found) == 16
    return found


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("dark", [0, 1], ids=["light", "dark"])
def test_every_part_of_a_step_is_told_from_every_other(dark: int, eyes: str) -> None:
    close = [
        (one, other)
        for (one, here), (other, there) in combinations(parts().items(), 2)
        if here[2] == there[2] and distance(here[dark], there[dark], eyes) < APART
    ]
    assert not close


@pytest.mark.parametrize("dark", [0, 1], ids=["light", "dark"])
def test_no_two_parts_have_nearly_the_same_colour(dark: int) -> None:
    found = parts()
    least = min(distance(here[dark], there[dark], "all cones") for here, there in combinations(found.values(), 2))
    assert least > 0.08
