"""The page before the server has read the run: it says so, and shows no empty pictures as if there were no steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect

from meshwright.observe.view import RunView, View
from meshwright.observe.web.server import PageServer
from tests.e2e.pages import Open
from tests.run_folders import write_run

pytestmark = pytest.mark.slow


class SlowRun(RunView):
    """A run that takes its time to be read, as one of many steps does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_go_on = threading.Event()

    def refresh(self) -> View:
        """As before, once it may."""
        self.may_go_on.wait(60)
        return super().refresh()


def test_a_page_whose_run_is_still_read_says_so(tmp_path: Path, opened: Open) -> None:
    run = SlowRun(write_run(tmp_path / "run", "dp=2", world=2, steps=5))
    server = PageServer([run])
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    serving.start()
    try:
        page, _ = opened(server.url)
        expect(page.locator("#state")).to_have_text("reading what the run has recorded")
        expect(page.locator("#loss")).not_to_be_visible()
        run.may_go_on.set()
        expect(page.locator("#state")).to_have_text("finished")
        expect(page.locator("#loss")).to_be_visible()
        # Before the server is gone, of which the page would tell.
        page.close()
    finally:
        run.may_go_on.set()
        server.close()
        serving.join()
