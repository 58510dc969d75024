"""What the model has learned, in its own words: a continuation of a prompt at the end of the run."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console as Terminal
from rich.panel import Panel
from rich.text import Text

from meshwright.models.generate import continue_text
from meshwright.training.hooks import Hook
from meshwright.training.loop import TrainingLoop


class Sample(Hook):
    """Prints a continuation of a prompt."""

    def __init__(self, prompt: str, tokens: int) -> None:
        self.prompt = prompt
        self.tokens = tokens

    def at_end(self, trainer: TrainingLoop) -> None:
        if not trainer.finished:
            return
        # On every rank, since sharded weights are gathered together; the first one prints.
        options = {"seed": trainer.config.run.seed, "predict": trainer.one_step.parallel.predict}
        made = "".join(continue_text(trainer.model, trainer.job.tokenizer, self.prompt, self.tokens, **options))
        trainer.one_step.parallel.reshard()
        if not trainer.world.is_first:
            return
        text = Text(self.prompt, style="bold")
        text.append(made, style="not bold")
        with suppress(BrokenPipeError, SystemExit):  # rich exits when its reader has gone away.
            Terminal().print(Panel(text, title="what it has learned to write", title_align="left", expand=False))
