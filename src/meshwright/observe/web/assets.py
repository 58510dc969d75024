"""The files of the page: those named here are served, nothing else, whatever a browser asks for."""

from __future__ import annotations

from importlib.resources import files

SCRIPTS = (
    "format.js",
    "draw.js",
    "data.js",
    "line_chart.js",
    "parts.js",
    "breakdown.js",
    "efficiency.js",
    "pipeline.js",
    "mesh.js",
    "memory.js",
    "tables.js",
    "summary.js",
    "main.js",
)
"""Modules of the page; each imports only from those before it."""
STYLE = "page.css"
ICON = "icon.svg"
PAGE = "page.html"
LOGIN = "login.html"
TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "html": "text/html; charset=utf-8",
}


def asset(name: str) -> str:
    """The text of one of the page's files."""
    if name not in (*SCRIPTS, STYLE, ICON, PAGE, LOGIN):
        raise KeyError(name)
    return (files("meshwright.observe.web") / "assets" / name).read_text(encoding="utf-8")


def content_type(name: str) -> str:
    """How a file is announced to a browser."""
    return TYPES[name.rsplit(".", 1)[1]]
