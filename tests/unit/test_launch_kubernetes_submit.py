"""Submitting to a cluster's API: all or nothing, with its own words when it refuses; status, logs, stop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.launch.kubernetes.options import KINDS
from tests.kubernetes_api import Cluster, Refused, kubeconfig, serving
from tests.kubernetes_runs import VOLUME

SETTINGS = (
    *("run.dir=runs/tiny", "data.path=data/packed", "model.preset=tiny", "parallel.strategy=zero=1"),
    *("train.global_batch=96", "--on", "kubernetes", "--image", "team/meshwright:1", "--namespace", "team"),
    *("--nodes", "2", "--gpus-per-node", "8", "--gpu", "h100", *VOLUME),
)
KIND_NAMES = {
    "job": ["ConfigMap/tiny", "ConfigMap/tiny-hostfile", "Job/tiny", "Service/tiny"],
    "pytorchjob": ["ConfigMap/tiny", "PyTorchJob/tiny"],
    "trainjob": ["ConfigMap/tiny", "TrainJob/tiny", "TrainingRuntime/tiny"],
    "rayjob": ["ConfigMap/tiny", "RayJob/tiny"],
    "raycluster": ["ConfigMap/tiny", "RayCluster/tiny"],
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path) as (found, config):
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield found


def launch(*words: str) -> int:
    return main(["launch", *SETTINGS, *words])


def status(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["launch", "status", "runs/tiny"])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_tried_first_then_created_and_removed_again(cluster: Cluster, kind: str) -> None:
    assert launch("--kind", kind) == 0
    assert cluster.names() == KIND_NAMES[kind]
    posts = [query for method, _, query in cluster.asked if method == "POST"]
    tried = [query.get("dryRun") == "All" for query in posts]
    assert tried == sorted(tried, reverse=True), "everything is tried before anything is created"
    assert all(query["fieldValidation"] == "Strict" for query in posts)
    assert main(["launch", "stop", "runs/tiny"]) == 0
    assert cluster.names() == []


def test_a_dry_run_asks_no_cluster(cluster: Cluster, tmp_path: Path) -> None:
    assert launch("--dry-run", str(tmp_path / "files")) == 0
    assert cluster.asked == []
    assert (tmp_path / "files/04-job.yaml").is_file()


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"namespaces": {"default"}}, (), "the namespace team does not exist"),
        ({"claims": set()}, (), "no PersistentVolumeClaim training in namespace team"),
        ({"served": {"v1", "batch/v1"}}, ("--kind", "rayjob"), "does not know RayJob of ray.io/v1: KubeRay"),
        ({"served": {"v1", "batch/v1"}}, ("--kind", "pytorchjob"), "Kubeflow's training operator"),
        (
            {"version": "28"},
            (),
            "the cluster is Kubernetes 1.28, and the objects are for 1.31: say --kube-version 1.28",
        ),
        (
            {"quotas": [{"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "8"}}}]},
            (),
            "asks for 16 nvidia.com/gpu, and ResourceQuota gpus of namespace team allows 8",
        ),
    ],
)
def test_what_the_cluster_has_not_is_told_before_anything_is_tried(
    cluster: Cluster,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    words: tuple[str, ...],
    message: str,
) -> None:
    vars(cluster).update(change)
    assert launch(*words) == 2
    assert message in capsys.readouterr().err
    assert cluster.created(dry=True) == cluster.created(dry=False) == []


QUOTA = 'pods "tiny" is forbidden: exceeded quota: compute, requested: requests.cpu=32, used: 90, limited: 100'


@pytest.mark.parametrize(
    ("kind", "refused", "message"),
    [
        ("Job", Refused(403, "Forbidden", QUOTA), f"quota of namespace team has no room for Job tiny: {QUOTA}"),
        ("Pod", Refused(403, "Forbidden", QUOTA), f"quota of namespace team has no room for Pod tiny: {QUOTA}"),
        ("Pod", Refused(403, "Forbidden", 'pods "tiny" violates PodSecurity "restricted"'), 'PodSecurity "restricted"'),
        ("Job", Refused(403, "Forbidden", 'User "me" cannot create resource "jobs"'), "you may not create Job tiny"),
        ("Job", Refused(422, "Invalid", 'Job "tiny" is invalid: spec.x: Required'), "refuses Job tiny: Job"),
        ("Service", Refused(409, "AlreadyExists", "exists"), "Service tiny is in namespace team already"),
        ("Job", Refused(500, "InternalError", "etcd is away"), "500 InternalError: etcd is away"),
    ],
)
def test_what_the_cluster_refuses_is_told_and_nothing_is_created(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], kind: str, refused: Refused, message: str
) -> None:
    cluster.refusals[kind, True] = refused
    assert launch() == 2
    assert message in capsys.readouterr().err
    assert cluster.created(dry=False) == []


def test_who_may_not_create_pods_may_still_create_jobs(cluster: Cluster) -> None:
    cluster.refusals["Pod", True] = Refused(403, "Forbidden", 'User "me" cannot create resource "pods"')
    assert launch() == 0


@pytest.mark.parametrize("kind", ["Job", "Service"])
def test_a_failure_half_way_leaves_nothing_behind(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], kind: str, tmp_path: Path
) -> None:
    cluster.refusals[kind, False] = Refused(409, "AlreadyExists", "someone was faster")
    assert launch() == 2
    assert f"{kind} tiny is in namespace team already" in capsys.readouterr().err
    assert cluster.names() == []
    assert cluster.created(dry=False)[:2] == ["configmaps", "configmaps"]
    assert not (tmp_path / "runs/tiny.launch/launch.json").exists()


def test_an_unknown_field_is_refused_in_the_clusters_words(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.launch.kubernetes.pod.placement", lambda *_: {"nodeSelektor": {}})
    assert launch() == 2
    assert "strict decoding error" in capsys.readouterr().err


def test_no_answer_and_no_kubeconfig_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:1")))
    assert launch() == 2
    assert "the cluster at http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert launch() == 2
    assert "no cluster is known here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a: [\ntoken: hunter2hunter2", "cannot be read: line 2 is no YAML"),
        (b"hello", "cannot be read: it has not the form of one"),
        (b"- hello", "cannot be read: it has not the form of one"),
        (b"clusters: 7\ncurrent-context: a\ncontexts: [a]", "it has not the form of one"),
        (b"\xff\xfe\x00", "cannot be read: "),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_kubeconfig_that_is_none_is_told_without_its_words(
    content: bytes | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is None:
        (tmp_path / "config").mkdir()
    else:
        (tmp_path / "config").write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert launch() == 2
    said = capsys.readouterr().err
    assert f"the kubeconfig {tmp_path}/config " in said
    assert told in said
    assert "hunter2" not in said


@pytest.mark.parametrize("answer", ["<html>Sign in</html>", "[]", "null", "7"])
def test_what_is_no_api_of_kubernetes_is_told(
    answer: str, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.page = answer
    assert launch() == 2
    assert "is no API of Kubernetes" in capsys.readouterr().err
    cluster.page = '{"hello": 1}'
    assert launch() == 2
    assert "the cluster does not know Job of batch/v1" in capsys.readouterr().err


def test_lists_that_are_null_are_empty(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.quotas = cluster.events = None  # type: ignore[assignment]  # As Go writes a list that was never made.
    assert launch() == 0
    assert "0 pods, none runs yet" in status(capsys)[1]


def test_a_second_launch_is_refused_while_the_first_runs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch() == 0
    cluster.add_pod("tiny", "tiny-0")
    assert launch() == 2
    assert "was launched before on kubernetes and is running" in capsys.readouterr().err


def test_a_job_that_has_ended_and_is_still_there_is_named(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch() == 0
    cluster.condition("Job", "tiny", "Failed", "PodFailurePolicy", "exit code 3 matches rule 0")
    assert launch() == 2
    assert "ConfigMap tiny is in namespace team already: `meshwright launch stop RUN`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "what", "state", "code"),
    [
        ("Job", "Complete", "finished", 0),
        ("Job", "Failed", "failed", 1),
        ("PyTorchJob", "Succeeded", "finished", 0),
        ("PyTorchJob", "Failed", "failed", 1),
        ("TrainJob", "Complete", "finished", 0),
        ("TrainJob", "Failed", "failed", 1),
    ],
)
def test_how_it_ended_is_in_the_jobs_conditions(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], kind: str, what: str, state: str, code: int
) -> None:
    assert launch("--kind", kind.lower()) == 0
    ended = {"name": "training", "state": {"terminated": {"exitCode": 3}}}
    cluster.add_pod("tiny", "tiny-1", "Failed", containerStatuses=[ended])
    cluster.condition(kind, "tiny", what, "TheReason", "in the words of the controller")
    found = status(capsys)
    assert found[0] == code
    assert f"{state} ({kind.lower()}/tiny in namespace team; TheReason: in the words of the controller" in found[1]
    assert ("pod/tiny-1 ended with 3" in found[1]) == (state == "failed")


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "waiting"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "finished"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "stopped"),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "head is gone"}, "failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "failed"),
    ],
)
def test_a_ray_job_says_it_in_its_own_fields(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], said: dict[str, str], state: str
) -> None:
    assert launch("--kind", "rayjob") == 0
    cluster.set_status("RayJob", "tiny", **said)
    found = status(capsys)[1]
    assert f"tiny on kubernetes: {state} (" in found
    assert said.get("message", "") in found


def test_what_keeps_it_waiting_is_quoted_with_the_object_to_look_at(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch() == 0
    assert "0 pods, none runs yet" in status(capsys)[1]
    cluster.warn("Job", "other", "FailedCreate", "of another run")
    assert "another run" not in status(capsys)[1]
    cluster.warn("Job", "tiny", "FailedCreate", "exceeded quota: compute")
    assert "waiting (job/tiny in namespace team; job/tiny: FailedCreate: exceeded quota: compute)" in status(capsys)[1]
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    cluster.add_pod("tiny", "tiny-0", "Pending", conditions=[condition])
    assert (
        "waiting (job/tiny in namespace team; pod/tiny-0 is not scheduled: Unschedulable: 0/4 nodes)"
        in status(capsys)[1]
    )
    waiting = {"name": "training", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}}
    cluster.pods.clear()
    cluster.add_pod("tiny", "tiny-0", "Pending", containerStatuses=[waiting])
    found = status(capsys)[1]
    assert "pod/tiny-0: ImagePullBackOff: Back-off pulling; is the --image there" in found
    cluster.add_pod("tiny", "tiny-1")
    assert "running (job/tiny in namespace team; 1 of 2 pods run; pod/tiny-0: ImagePullBackOff" in status(capsys)[1]


def test_a_suspended_job_waits_for_its_queue(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--kueue-queue", "team") == 0
    assert "waiting (job/tiny in namespace team; suspended: it waits for its queue" in status(capsys)[1]


def test_logs_are_of_all_pods_and_followed_until_the_end(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch() == 0
    for index in (0, 1):
        cluster.add_pod("tiny", f"tiny-{index}", lines=(f"step 1 of {index}",))
    capsys.readouterr()
    assert main(["launch", "logs", "runs/tiny"]) == 0
    assert capsys.readouterr().out == "[tiny-0] step 1 of 0\n[tiny-1] step 1 of 1\n"

    def train() -> None:
        time.sleep(0.3)
        cluster.logs["tiny-0"].append("step 2 of 0")
        time.sleep(0.3)
        cluster.add_pod("tiny", "tiny-2", lines=("came late",))
        time.sleep(2.5)
        for pod in cluster.pods:
            pod["status"]["phase"] = "Succeeded"
        cluster.condition("Job", "tiny", "Complete")

    training = threading.Thread(target=train)
    training.start()
    assert main(["launch", "logs", "runs/tiny", "--follow"]) == 0
    training.join()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[tiny-0] step 1 of 0",
        "[tiny-0] step 2 of 0",
        "[tiny-1] step 1 of 1",
        "[tiny-2] came late",
    ]


def test_stop_deletes_in_the_foreground_and_waits_for_the_pods(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch() == 0
    cluster.add_pod("tiny", "tiny-0")
    cluster.lingers = True
    assert main(["launch", "stop", "runs/tiny"]) == 0
    found = status(capsys)
    assert "running (job/tiny in namespace team is being deleted; its pods save and end)" in found[1]
    cluster.objects.clear()
    found = status(capsys)
    assert found[0] == 0
    assert "stopped (job/tiny in namespace team is not there" in found[1]
    assert main(["launch", "stop", "runs/tiny"]) == 2
    assert "is not there any more" in capsys.readouterr().err


def test_the_context_is_kept_by_its_name(cluster: Cluster, tmp_path: Path) -> None:
    assert launch() == 0
    assert json.loads((tmp_path / "runs/tiny.launch/launch.json").read_text())["context"] == "test"


def test_the_token_of_the_kubeconfig_is_written_nowhere(cluster: Cluster, tmp_path: Path) -> None:
    assert launch() == 0
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if "a-token-of-the-test" in path.read_text()]
