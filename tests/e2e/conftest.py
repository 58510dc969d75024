"""Shared by tests of the command line: an object store on this machine; a browser, and pages that are served to it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest

from tests.e2e.pages import Open, Seen
from tests.run_folders import write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    """A bucket on a server in a process of its own: threads in this one would keep later tests from forking ranks."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    log = tmp_path / "server.txt"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        address = found[0]
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="runs")
        yield client
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium; make system installs it on Debian")
    # Only here: most tests of this folder need no browser.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
    # Tests that follow fork: the thread that has waited for the browser must be gone.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(10)
    assert threading.active_count() == 1


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens an address in a page of its own; no page may have had an error."""
    contexts, all_seen = [], []

    def visit(url: str, width: int = 1200, **options: Any) -> tuple[Page, Seen]:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        all_seen.append(Seen(page))
        page.goto(url)
        return page, all_seen[-1]

    yield visit
    for context in contexts:
        context.close()
    assert [seen.errors for seen in all_seen] == [[] for _ in all_seen]


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[..., str]]:
    """Starts `meshwright watch --web` and gives the address; ends with the tests."""
    processes = []

    def begin(*arguments: object) -> str:
        command = [sys.executable, "-m", "meshwright", "watch", "--web", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert said is not None
        return said[0]

    yield begin
    for process in processes:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, served: Callable[..., str]) -> str:
    """The address of a run on 32 ranks, split in three ways."""
    folder = tmp_path_factory.mktemp("large") / "large"
    return served(write_run(folder, "dp=4 tp=2 pp=4", world=32, steps=120, planned_steps=400, end=None))
