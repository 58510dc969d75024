"""What was found as a table, as lines under it, and as JSON. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.bench.contenders import Contender
from meshwright.bench.roofline import Ceilings, Work, lines
from meshwright.bench.trial import Found, Trial
from meshwright.cluster.cluster import chip_named
from meshwright.models.count import count_parameters

GIB = 2**30
HEADINGS = (
    "contender",
    "micro-batch",
    "ms/step",
    "tokens/s",
    "ratio",
    "MFU",
    "floor",
    "peak GiB",
    "first step s",
    "loss",
)


@dataclass(frozen=True)
class Row:
    """A contender at one micro-batch, over all repeats."""

    contender: Contender
    micro_batch: int
    found: tuple[Found, ...] = ()
    trouble: str | None = None
    """Why there are no figures: not installed, cannot, failed."""

    @property
    def ms(self) -> float:
        """Median over all timed steps."""
        return median(one for found in self.found for one in found.step_ms)

    def tokens_per_s(self, length: int) -> float:
        return 1e3 * self.micro_batch * length / self.ms

    @property
    def peak_bytes(self) -> float:
        return max(found.peak_bytes for found in self.found)

    def first_step_s(self, warm: bool) -> float | None:
        """From the start of a process to the end of its first step: of the first one, or the median of later ones."""
        those = [found.first_step_s for found in self.found if found.warm == warm]
        return median(those) if those else None


@dataclass(frozen=True)
class Report:
    """All that is told."""

    trials: tuple[Trial, ...]
    """One for each micro-batch."""
    rows: tuple[Row, ...]
    """Every contender at every micro-batch, in order."""
    baseline: str
    ceilings: Ceilings | None
    no_ceilings: str | None = None
    full_attention: bool = False

    def best(self) -> list[Row]:
        """Of each contender the row with the most tokens a second; one in trouble has its first."""
        length = self.trials[0].length
        chosen: dict[str, Row] = {}
        for row in self.rows:
            other = chosen.get(row.contender.name)
            faster = row.trouble is None and (
                other is None or other.trouble is not None or row.tokens_per_s(length) > other.tokens_per_s(length)
            )
            if other is None or faster:
                chosen[row.contender.name] = row
        return list(chosen.values())

    def reference(self) -> Row | None:
        """The row that others are compared with: the baseline's, or the first that ran."""
        ran = [row for row in self.best() if row.trouble is None]
        return next((row for row in ran if row.contender.name == self.baseline), ran[0] if ran else None)

    def ratio(self, row: Row) -> float | None:
        """Tokens a second over those of the reference."""
        reference, length = self.reference(), self.trials[0].length
        return None if reference is None else row.tokens_per_s(length) / reference.tokens_per_s(length)

    def work(self, micro_batch: int) -> Work:
        """The least work of a step."""
        trial = next(one for one in self.trials if one.micro_batch == micro_batch)
        return Work.of(trial.spec, trial.tokens, trial.length, trial.config.train)

    def peak_flops(self) -> tuple[float, str] | None:
        """By which MFU is told, and whose figure that is: the vendor's, or what was measured."""
        found = next((one for row in self.rows for one in row.found), None)
        dtype = self.trials[0].config.train.precision
        if found is not None and found.device != "cpu":
            chip = chip_named(found.device, found.device_mib)
            if chip is not None and dtype in chip.tflops:
                return chip.peak(dtype), f"the vendor's {chip.tflops[dtype]:.4g} TFLOP/s of {chip.name}"
        if self.ceilings is not None:
            return self.ceilings.flops, f"the {self.ceilings.flops / 1e12:.4g} TFLOP/s measured here"
        return None

    def mfu(self, row: Row) -> float | None:
        """Model FLOPs a second over the peak."""
        peak, work = self.peak_flops(), self.work(row.micro_batch)
        flops = work.full_model_flops if self.full_attention else work.model_flops
        return None if peak is None else flops / (row.ms / 1e3) / peak[0]

    def times_floor(self, row: Row) -> float | None:
        """The step over the least that it could take."""
        if self.ceilings is None:
            return None
        return row.ms / (1e3 * self.work(row.micro_batch).floor_s(self.ceilings))

    def as_json(self) -> dict[str, Any]:
        """The stable form: docs/bench.md says what is in it."""
        first, reference = self.trials[0], self.reference()
        found = next((one for row in self.rows for one in row.found), None)
        peak = self.peak_flops()
        return {
            "device": found.device if found else None,
            "torch": found.torch if found else None,
            "parameters": count_parameters(first.spec).total,
            "sequence": first.length,
            "steps": first.steps,
            "warm_up": first.warm_up,
            "config": first.config.model_dump(mode="json"),
            "baseline": reference.contender.name if reference else None,
            "mfu": {
                "attention": "full" if self.full_attention else "causal",
                "peak_flops": peak[0] if peak else None,
                "peak_is": peak[1] if peak else None,
            },
            "rows": [self._row_json(row) for row in self.rows],
            "best": {row.contender.name: row.micro_batch for row in self.best() if row.trouble is None},
            "roofline": {
                str(one.micro_batch): self.work(one.micro_batch).as_json(self.ceilings) for one in self.trials
            },
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        named = {"contender": row.contender.name, "micro_batch": row.micro_batch, "trouble": row.trouble}
        if row.trouble is not None:
            return named
        return named | {
            "version": row.contender.version,
            "ms_per_step": row.ms,
            "mean_ms": mean(one for found in row.found for one in found.step_ms),
            "repeats_ms": [median(found.step_ms) for found in row.found],
            "tokens_per_s": row.tokens_per_s(self.trials[0].length),
            "ratio": self.ratio(row),
            "mfu": self.mfu(row),
            "times_floor": self.times_floor(row),
            "peak_gib": row.peak_bytes / GIB,
            "first_step_s": {"cold": row.first_step_s(warm=False), "warm": row.first_step_s(warm=True)},
            "parameters": row.found[0].parameters,
            "first_loss": row.found[0].losses[0],
            "last_loss": row.found[0].losses[-1],
            "notes": list(row.found[0].notes),
        }


def rows_of(contenders: Sequence[Contender], trials: Sequence[Trial], found: Sequence[Found]) -> tuple[Row, ...]:
    """A row for every contender and micro-batch; one that is missing or failed has its reason."""
    rows = []
    for contender in contenders:
        if missing := contender.missing():
            rows.append(Row(contender, trials[0].micro_batch, trouble=missing))
            continue
        for trial in trials:
            those = [one for one in found if (one.contender, one.micro_batch) == (contender.name, trial.micro_batch)]
            failures = [f"failed: {one.failure}" for one in those if one.failure]
            refusals = [one.refusal for one in those if one.refusal]
            trouble = next(iter((*failures, *refusals)), None)
            rows.append(Row(contender, trial.micro_batch, tuple(those) if trouble is None else (), trouble))
    return tuple(rows)


def show(report: Report, console: Console) -> None:
    """The table, then the floor and what to know of the contenders."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=True)
    length, best = report.trials[0].length, report.best()
    for row in best:
        if row.trouble is not None:
            continue
        cold, warm = row.first_step_s(warm=False), row.first_step_s(warm=True)
        first = " / ".join(f"{one:.1f}" for one in (cold, warm) if one is not None)
        cells = [row.contender.name, str(row.micro_batch), f"{row.ms:.2f}", f"{row.tokens_per_s(length):,.0f}"]
        cells += [_told(report.ratio(row), "{:.3f}"), _told(report.mfu(row), "{:.1%}")]
        cells += [_told(report.times_floor(row), "{:.2f}x"), f"{row.peak_bytes / GIB:.2f}", first]
        table.add_row(*cells, f"{row.found[0].losses[-1]:.4f}")
    console.print(table)
    said = [f"{row.contender.name}: {row.trouble}" for row in best if row.trouble is not None]
    if len(report.trials) > 1:
        said += [
            f"{row.contender.name} at micro-batch {row.micro_batch}: {row.trouble}"
            for row in report.rows
            if row.trouble is not None and row not in best
        ]
    said += ["", *_below(report, best)]
    for line in said:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _told(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _below(report: Report, best: Sequence[Row]) -> list[str]:
    said = []
    reference, peak = report.reference(), report.peak_flops()
    if reference is not None:
        said.append(f"ratio: tokens/s over those of {reference.contender.name}; first step: cold / warm start")
    if peak is not None:
        kind = "every token to every other" if report.full_attention else "the causal half"
        said.append(f"MFU: of {peak[1]}; attention counted as {kind}, three times its forward pass")
    if report.no_ceilings is not None:
        said.append(f"no floor: ceilings could not be measured: {report.no_ceilings}")
    elif report.ceilings is not None and reference is not None:
        size = reference.micro_batch
        said += [
            "",
            f"what a step of micro-batch {size} takes at least; `floor` is a step over that of its micro-batch:",
        ]
        said += lines(report.work(size), report.ceilings, report.trials[0].config.train.precision)
    said += ["", *(f"{row.contender.name} {row.contender.version}: {row.contender.summary}" for row in best)]
    return said + [f"{row.contender.name}: {note}" for row in best if row.found for note in row.found[0].notes]
