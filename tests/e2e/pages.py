"""What tests of the page in a real browser share: what a page has said, how it is opened, what is cut off there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Seen:
    """What a page has said and asked for."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or request.url[:5]))


Open = Callable[..., "tuple[Page, Seen]"]
"""Opens an address at a width."""


def sideways(page: Page) -> int:
    """By how many pixels a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def text_beyond_pictures(page: Page) -> list[str]:
    """Texts of pictures that are cut off at an edge."""
    script = """() => [...document.querySelectorAll('.picture > svg')].flatMap(picture => {
        const edge = picture.getBoundingClientRect();
        return [...picture.querySelectorAll('text')].filter(text => {
            const box = text.getBoundingClientRect();
            return box.width && (box.left < edge.left - 0.5 || box.right > edge.right + 0.5);
        }).map(text => `${picture.closest('section').id}: ${text.textContent}`);
    })"""
    return list(page.evaluate(script))
