"""`meshwright launch --on hosts` over real sshds: three hosts and a fourth from which runs are launched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.trainings import events, metrics
from tests.hosts import Hosts

STEPS = 300
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Site:
    """Hosts a, b and c with an sshd each, and a login host."""

    hosts: Hosts
    folder: Path
    ssh: str

    def launch(self, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        process = self.hosts.popen("login", "meshwright", "launch", *words)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def wait_for(self, run: Path, step: int) -> None:
        deadline = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < step:
            assert time.monotonic() < deadline, self.launch("logs", str(run)).stdout
            time.sleep(0.1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not Path(SSHD).exists():
        pytest.skip("needs sshd, of Debian's openssh-server")
    folder = tmp_path_factory.mktemp("site")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it.
    (folder / "sshd.conf").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\nPidFile none\n"
        "PasswordAuthentication no\nPermitRootLogin yes\n"
        # What is tested is what runs there.
        f"SetEnv PYTHONPATH={os.environ.get('PYTHONPATH', '')}\n"
    )
    options = f"-i {folder}/user -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known"
    before = set(psutil.pids())
    with Hosts(["a", "b", "c", "login"], folder) as hosts:
        for name in "abc":
            listen = f"ListenAddress={hosts.address(name)}"
            hosts.start(name, SSHD, "-D", "-e", "-f", f"{folder}/sshd.conf", "-o", listen)
        yield Site(hosts, folder, f"ssh {options} -o ConnectTimeout=3 -o LogLevel=ERROR {{host}}")
    # The stores, which outlive a run that was stopped by minutes.
    for process in psutil.process_iter(["cmdline"]):
        if process.pid not in before and any(str(folder) in word for word in process.info["cmdline"] or []):
            for one in [*process.children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.fixture
def run_words(site: Site, tiny_run: list[str]) -> list[str]:
    """A run on hosts a, b and c by their addresses, a rank on each."""
    names = "".join(f"{site.hosts.address(name)} slots=1\n" for name in "abc")
    (site.folder / "hostfile").write_text(f"# three of them\n{names}")
    return [
        *tiny_run,
        "train.global_batch=6",
        "--on",
        "hosts",
        "--hostfile",
        "hostfile",
        "--ssh",
        site.ssh,
        "--env",
        "OMP_NUM_THREADS=1",
    ]


def test_three_hosts_train_stop_and_go_on_where_they_were(site: Site, run_words: list[str]) -> None:
    run = site.folder / "runs/three"
    words = [*run_words, f"run.dir={run}", f"train.steps={STEPS}", "checkpoint.every=0"]
    launched = site.launch(*words)
    assert launched.returncode == 0, launched.stderr
    assert "on 3 ranks" in launched.stdout
    site.wait_for(run, 5)
    status = site.launch("status", str(run))
    assert "on hosts: running" in status.stdout
    again = site.launch(*words)
    assert again.returncode == 2
    assert "was launched before on hosts and is running" in again.stderr
    stopped = site.launch("stop", str(run), "--wait", "60")
    assert "stopped (" in stopped.stdout, stopped.stderr
    assert stopped.stdout.count("ended with 75") == 3
    done = len(metrics(run))
    assert 5 <= done < STEPS
    assert site.launch(*words).returncode == 0
    followed = site.launch("logs", str(run), "--follow")
    assert all(f"{site.hosts.address(name)}: " in followed.stdout for name in "abc")
    assert "on hosts: finished" in site.launch("status", str(run)).stdout
    own = [site.launch("logs", str(run), "--rank", str(rank)).stdout for rank in range(3)]
    assert [f"step {STEPS}/{STEPS}" in text for text in own] == [True, False, False]
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))
    assert {event["event"] for event in events(run)} >= {"started", "resumed", "finished"}
    # The store listens on the address of the first host.
    record = json.loads((run.parent / "three.launch/launch.json").read_text())
    assert record["rendezvous"].startswith(f"{site.hosts.address('a')}:")


def test_a_host_that_does_not_answer_is_named_before_anything_starts(site: Site, run_words: list[str]) -> None:
    run = site.folder / "runs/away"
    (site.folder / "hostfile").write_text(f"{site.hosts.address('a')}\n10.77.0.99\n")
    refused = site.launch(*run_words, f"run.dir={run}")
    assert refused.returncode == 2
    assert "10.77.0.99: ssh: connect to host 10.77.0.99 port 22:" in refused.stderr
    assert not run.exists()
    assert not (run.parent / "away.launch").exists()


def test_a_host_that_lacks_python_is_named_before_anything_starts(site: Site, run_words: list[str]) -> None:
    refused = site.launch(*run_words, f"run.dir={site.folder}/runs/bare", "--python", "/no/such/python")
    assert refused.returncode == 2
    assert refused.stderr.count("/no/such/python") == 3


def test_what_would_run_is_written_for_review(site: Site, run_words: list[str]) -> None:
    shown = site.launch(*run_words, f"run.dir={site.folder}/runs/dry", "--dry-run", "review")
    assert shown.returncode == 0, shown.stderr
    commands = (site.folder / "review/commands.sh").read_text().splitlines()
    assert len(commands) == 5
    assert "meshwright rendezvous" in commands[1]
    assert all("meshwright.launch.node" in line for line in commands[2:])
    assert (site.folder / "review/hostfile").read_text().count("slots=1") == 3
    assert sys.executable in commands[2]
    assert not os.path.exists(site.folder / "runs/dry.launch")
