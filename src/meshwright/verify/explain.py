"""The first difference in words: what departs, and where to look."""

from __future__ import annotations

from meshwright.verify.first_difference import Difference


def explain(difference: Difference) -> str:
    """What departs and where to look."""
    name, factor = difference.name, difference.factor
    where = f"in step {difference.step}" + (f", on rank {difference.rank}" if difference.rank is not None else "")
    times = "" if factor is None or abs(factor) < 1e-6 else f", {factor:.4g} times what it should be"
    before = f"; {difference.after} before it agrees" if difference.after else ""
    match difference.kind:
        case "output":
            what = f"the output of {name} is the first that departs, {where}{times}{before}"
        case "output gradient":
            what = f"all outputs agree; going backward, the gradient of the output of {name} is the first that departs"
            what += f", {where}{times}" + (f"; that of {difference.after} agrees" if difference.after else "")
        case "loss":
            what = f"all outputs that can be compared agree and the loss departs, {where}"
        case "parameter gradient":
            what = f"all outputs and their gradients agree, and the gradient of {name} departs, {where}{times}"
            what += " like all others" if difference.everywhere else ""
        case "gradient norm":
            what = f"all gradients agree and their norm departs, {where}"
        case "update":
            what = f"all gradients agree, and {name} departs after the update, {where}"
    return f"{what}. {_hint(difference)}"


def _hint(difference: Difference) -> str:
    """Where to look."""
    match difference.kind, difference.rule:
        case "output", "region" | "vocabulary":
            return "Its output is the sum of the tp ranks' parts: look at that sum, and at what the table says inside"
        case "output", "row":
            return (
                "Its parts, added up over the tp ranks, are compared: look at its inputs, and that its bias counts once"
            )
        case "output", "lookup" | "dropout":
            return "With sp a rank works on its own tokens: look at which ones"
        case "output", _:
            return "Look at what it computes from inputs that agree"
        case "output gradient", _:
            return "Look at the backward pass of what takes this output, and of the sums over ranks there"
        case "parameter gradient", _ if difference.everywhere:
            return "Look at the number by which gradients are divided when they are summed over data ranks"
        case "parameter gradient", "shared" | "tokens" | "lookup" as rule:
            return (
                f"The table says {rule}: gradients are summed over tp ranks inside a region under shared, "
                "and between regions, where ranks have their own tokens, under tokens and lookup"
            )
        case "parameter gradient", _:
            return "Look at how the ranks' parts of this gradient are summed, over tp and over data ranks"
        case "loss", _:
            return "Look at how the ranks' losses are divided and added up"
        case "gradient norm", _:
            return "Look at which parts of gradients are added up, and over which ranks"
        case _:
            return "Look at the optimizer: its state, its groups, and how updated parts are put together"
