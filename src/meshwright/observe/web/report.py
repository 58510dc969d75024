"""A run as one HTML file that needs nothing else: the page's own style and scripts with the data written into it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.files import replace_text
from meshwright.observe.snapshot import snapshot, to_text
from meshwright.observe.view import RunView, View
from meshwright.observe.web.assets import ICON, PAGE, SCRIPTS, STYLE, asset

REPORT = "report.html"
_LINKS = re.compile(r'<(?:link|script)\b[^>]*"/assets/[^>]*>(?:</script>)?\n?')
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z_]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|class|const) (\w+))", re.MULTILINE)


def report_page(views: Sequence[View]) -> str:
    """The HTML of some runs as they are."""
    style, script = asset(STYLE), bundle()
    icon = "data:image/svg+xml;base64," + base64.b64encode(asset(ICON).strip().encode()).decode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page, links = _LINKS.subn("", asset(PAGE))
    assert links == 3, "the page links to its style, its script and its icon"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="{icon}">\n<style>{style}</style>\n</head>'
    )
    body = (
        f'<script type="application/json" id="embedded">{_harmless(to_text(snapshot(views)))}</script>\n'
        f"<script>{script}</script>\n</body>"
    )
    return page.replace("</head>", head, 1).replace("</body>", body, 1)


def bundle() -> str:
    """The page's modules as one script: each a function that gives what it exports, called in order."""
    return '"use strict";\n' + "".join(_wrapped(name.removesuffix(".js"), asset(name)) for name in SCRIPTS)


def _wrapped(name: str, module: str) -> str:
    exported = ", ".join(_EXPORT.findall(module))
    body = _EXPORT.sub("", _IMPORT.sub(r"const \1 = module_\2;", module))
    return f"const module_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def write_report(folder: Path, out: Path | None = None, view: View | None = None) -> tuple[Path, View]:
    """Write the report of a run folder, as it is or as it was seen; gives where it is, and what it shows."""
    view = view or RunView(folder).refresh()
    path = folder / REPORT if out is None else out
    replace_text(path, report_page([view]))
    return path, view


def _harmless(text: str) -> str:
    """JSON that ends no element, whatever names and texts a run has."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
