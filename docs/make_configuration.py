"""Write docs/configuration.md from the configuration classes; a test holds the page to what this prints.

python docs/make_configuration.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config import RunConfig

HEAD = """\
# Configuration

One TOML file, with overrides on the command line: `meshwright train run.toml train.steps=100`. An override splits at
its first `=`. Later ones win: defaults, then `--preset`, then the file, then the command line. Unknown names and wrong
values are errors that name the place and what is allowed; `meshwright train ... --explain` prints every setting with
its value and origin. The resolved configuration of a run is in its folder as `config.toml` and reproduces the run.
Other trainers' names, such as `learning_rate`, are taken where they mean the same: [interop.md](interop.md).

A run folder belongs to one configuration. Settings marked * may change when a run is resumed, the others may not.

This page is made by `python docs/make_configuration.py` from the documentation in `src/meshwright/config.py`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, field in RunConfig.model_fields.items():
        parts.append(f"\n## [{section}]\n\n| setting | default | meaning |\n|---|---|---|\n")
        for name, entry in field.annotation.model_fields.items():  # type: ignore[union-attr]
            extra: Any = entry.json_schema_extra or {}
            star = " *" if extra.get("free") else ""
            default = "none" if entry.default is None else repr(entry.default).replace("'", '"')
            # A row of a table is one line.
            meaning = " ".join((entry.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{section}.{name}`{star} | `{default}` | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "configuration.md").write_text(page())
