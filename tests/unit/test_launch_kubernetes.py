"""What is written for Kubernetes is what its API and the operators' take, for every kind, release and option."""

from __future__ import annotations

import copy
import itertools
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from kubeflow.training import ApiClient as TrainingClient
from kubeflow_trainer_api.models import TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob
from kubernetes.client import ApiClient

from meshwright.launch.kubernetes import documents
from meshwright.launch.kubernetes.cluster import TARGET
from meshwright.launch.kubernetes.options import KINDS, TRAINER_RELEASES
from tests.kubernetes_runs import VOLUME, arguments, job_of, submission, written
from tests.kubernetes_schemas import RELEASES, errors

OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "asked": (
        *("--cpu", "32", "--memory", "512Gi", "--shm", "64Gi", "--rdma", "rdma/hca=2", "--termination-grace", "300"),
        *("--secret-env", "WANDB_API_KEY=wandb:key", "--image-pull-secret", "registry", "--service-account", "trainer"),
        *("--node-selector", "gpu=h100", "--toleration", "gpu=yes:NoSchedule", "--toleration", "spot"),
        *("--topology-key", "topology.kubernetes.io/zone", "--priority-class", "high"),
        *("--volume", "data=pvc:corpora:/data:ro", "--volume", "scratch=emptydir:50Gi:/scratch"),
        *("--volume", "local=hostpath:/mnt/nvme:/nvme", "--allow-host-path", "--run-as-user", "2000", "--isolate"),
    ),
    "kueue": ("--kueue-queue", "team", "--topology-key", "cloud.example.com/rack"),
    "volcano": ("--volcano-queue", "team"),
}


def checked(kind: str, options: str, nodes: str, release: str = "1.31", trainer: str = "2.3") -> dict[str, Any]:
    """What is written, by file, and found right."""
    more = ("--trainer-version", trainer) if kind == "trainjob" else ()
    if options == "asked" and kind not in ("pytorchjob", "raycluster"):
        more += ("--backoff-limit", "12")
    words = ("--kind", kind, "--kube-version", release, *OPTIONS[options], *more, *VOLUME)
    found = written(arguments(*words), submission(nodes, 8))
    wrong = {name: errors(one, release, trainer) for name, one in found.items()}
    assert not any(wrong.values()), wrong
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_kind_with_every_option_fits_its_schema(kind: str, options: str) -> None:
    # What is not among them is refused: test_launch_kubernetes_refusals.py.
    elastic = kind != "trainjob" and not (kind.startswith("ray") and options == "kueue")
    for nodes in ("1", "3", *(["2:4"] if elastic else [])):
        checked(kind, options, nodes)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_only_fields_of_the_release_are_written(kind: str, release: str) -> None:
    found = checked(kind, "asked", "3", release)
    job = found["05-job.yaml"]["spec"] if kind == "job" else runtime_job(found["03-trainingruntime.yaml"])
    minor = int(release.split(".")[1])
    assert ("podFailurePolicy" in job) == (minor >= 26)
    assert ("backoffLimitPerIndex" in job) == (minor >= 29) != ("backoffLimit" in job)
    assert ("podReplacementPolicy" in job) == (minor >= 29)


def runtime_job(runtime: dict[str, Any]) -> dict[str, Any]:
    """The Job within a TrainingRuntime."""
    return runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


TRAINERS = [pair for pair in itertools.product(TRAINER_RELEASES, OPTIONS) if pair != ("2.0", "volcano")]


@pytest.mark.parametrize(("trainer", "options"), TRAINERS)
def test_train_jobs_are_of_their_trainers_release(trainer: str, options: str) -> None:
    spec = list(checked("trainjob", options, "3", trainer=trainer).values())[-1]["spec"]
    names = {"2.0": "podSpecOverrides", "2.1": "podTemplateOverrides"}
    assert {"podSpecOverrides", "podTemplateOverrides", "runtimePatches"} & spec.keys() == {
        names.get(trainer, "runtimePatches")
    }
    assert not [one["name"] for one in spec["trainer"]["env"] if one["name"].startswith("PET_")]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["job", "pytorchjob", "trainjob"])
def test_typed_models_keep_every_field(kind: str, options: str) -> None:
    """The models drop what they do not know: a field that is gone after a round trip was none."""
    client = ApiClient()
    for one in checked(kind, options, "3").values():
        match one["kind"]:
            case "PodGroup":
                continue
            case "PyTorchJob":
                again = round_trip(TrainingClient(), one, "KubeflowOrgV1PyTorchJob")
            case "TrainJob":
                again = TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(one)).to_dict()
            case "TrainingRuntime":
                again = TrainerV1alpha1TrainingRuntime.from_dict(copy.deepcopy(one)).to_dict()
            case known:
                again = round_trip(client, one, f"V1{known}")
        assert json.loads(json.dumps(again)) == one


class Answer:
    """What a client's deserialize reads."""

    def __init__(self, one: dict[str, Any]) -> None:
        self.data = json.dumps(one)


def round_trip(client: Any, one: dict[str, Any], model: str) -> Any:
    return client.sanitize_for_serialization(client.deserialize(Answer(one), model))


PLANTED: list[tuple[str, str, Any]] = [
    ("job", "spec/completionMod", "Indexed"),
    ("job", "spec/template/spec/containers/0/imagePullPolice", "Always"),
    ("job", "spec/completions", "two"),
    ("job", "spec/template/spec/containers/0/volumeMounts/0/mountPath", None),
    ("pytorchjob", "spec/nprocPerNode", 8),
    ("pytorchjob", "spec/pytorchReplicaSpecs", None),
    ("pytorchjob", "spec/pytorchReplicaSpecs/Worker/template/spec/tolerationz", []),
    ("pytorchjob", "spec/runPolicy/schedulingPolicy", {"minAvailable": "all"}),
    ("trainjob", "spec/runtimeRef/name", None),
    ("trainjob", "spec/trainer/numProcPerNode", "auto"),
    ("trainjob", "spec/podTemplateOverrides", []),
    ("rayjob", "spec/rayClusterSpec/headGroupSpec", None),
    ("rayjob", "spec/backoffLimit", "two"),
    ("rayjob", "spec/rayClusterSpec/workerGroupSpecs/0/template/spec/containers/0/gpus", 8),
    ("raycluster", "spec/workerGroupSpecs/0/groupName", None),
    ("raycluster", "metadata/labelz", {}),
]


@pytest.mark.parametrize(("kind", "path", "value"), PLANTED)
def test_the_schemas_find_what_is_wrong(kind: str, path: str, value: Any) -> None:
    """Unknown fields, wrong types, missing ones (None), each planted into a right object."""
    one = job_of(arguments("--kind", kind, *VOLUME), submission("2", 8))
    assert errors(one) == []
    *steps, last = path.split("/")
    place = one
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    assert any(last in message for message in errors(one)), errors(one)


def container_of(kind: str, *words: str, nodes: str = "2") -> dict[str, Any]:
    """The training container of a kind whose pods we write whole."""
    spec = job_of(arguments("--kind", kind, *words, *VOLUME), submission(nodes, 8))["spec"]
    template = spec["template"] if kind == "job" else next(iter(spec["pytorchReplicaSpecs"].values()))["template"]
    return {**template["spec"], "container": template["spec"]["containers"][0]}


def test_pods_are_ordinary_users_that_may_do_nothing_special() -> None:
    for kind in ("job", "pytorchjob"):
        pod = container_of(kind)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["container"]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["automountServiceAccountToken"] is False
    assert container_of("job", "--rdma", "rdma/hca")["container"]["securityContext"]["capabilities"]["add"] == [
        "IPC_LOCK"
    ]


def test_secrets_are_references_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-value-that-nobody-may-see")
    for kind in KINDS:
        files = TARGET.files(
            submission("2", 8), arguments("--kind", kind, "--secret-env", "WANDB_API_KEY=wandb:api-key", *VOLUME)
        )
        assert "a-value-that-nobody-may-see" not in "".join(files.values())
        assert any("secretKeyRef" in text for text in files.values())


def test_jobs_end_on_hopeless_codes_and_ignore_saved_and_lost_pods() -> None:
    rules = job_of(arguments("--kind", "job", *VOLUME), submission())["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3, 4, 5, 7, 9]),
        ("Ignore", [6, 75]),
        ("Ignore", None),
    ]
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_a_quarantined_machine_ends_its_own_index_where_the_others_can_go_on() -> None:
    spec = job_of(arguments("--kind", "job", *VOLUME), submission("2:4", 8))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules] == [
        ("FailJob", [2, 3, 4, 5, 7]),
        ("FailIndex", [9]),
        ("Ignore", [6, 75]),
        ("Ignore", None),
    ]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (10, 2)


def test_what_has_ended_stays_a_week_and_a_ray_cluster_not_at_all() -> None:
    """A RayJob's field is about its cluster, which holds the GPUs."""

    def ttl(kind: str, *words: str) -> int:
        spec = job_of(arguments("--kind", kind, *words, *VOLUME), submission("2", 8))["spec"]
        return spec.get("runPolicy", spec)["ttlSecondsAfterFinished"]

    assert [ttl(kind) for kind in ("job", "pytorchjob", "rayjob")] == [604800, 604800, 0]
    assert [ttl(kind, "--ttl-after-finished", "60") for kind in ("job", "pytorchjob", "rayjob")] == [60, 60, 60]


def test_nothing_is_written_into_a_pytorch_job_that_its_operator_does_not_heed() -> None:
    assert (
        "backoffLimit"
        not in job_of(arguments("--kind", "pytorchjob", *VOLUME), submission("2", 8))["spec"]["runPolicy"]
    )


def test_a_pytorch_job_of_a_range_has_workers_alone_and_an_elastic_policy() -> None:
    spec = job_of(arguments("--kind", "pytorchjob", *VOLUME), submission("2:4", 8))["spec"]
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 4, "rdzvBackend": "c10d"}
    assert {kind: one["replicas"] for kind, one in spec["pytorchReplicaSpecs"].items()} == {"Worker": 4}
    fixed = job_of(arguments("--kind", "pytorchjob", *VOLUME), submission("3", 8))["spec"]
    assert {kind: one["replicas"] for kind, one in fixed["pytorchReplicaSpecs"].items()} == {"Master": 1, "Worker": 2}
    assert "elasticPolicy" not in fixed
    assert fixed["nprocPerNode"] == "8"


def test_a_ray_cluster_of_a_range_is_autoscaled_and_its_head_has_no_cpu() -> None:
    job = job_of(arguments("--kind", "rayjob", *VOLUME), submission("2:4", 8))["spec"]
    group = job["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"], group["replicas"]) == (2, 4, 2)
    assert job["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert job["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert job["entrypoint"].startswith("python -m meshwright launch /meshwright/run.toml --on ray --nodes 2:4")
    # Ray's autoscaler refuses a group whose CPUs it is not told; where the pod asks for some, KubeRay tells it.
    assert group["rayStartParams"] == {"num-cpus": "8"}
    asking = job_of(arguments("--kind", "rayjob", "--cpu", "16", *VOLUME), submission("2:4", 8))["spec"]
    assert asking["rayClusterSpec"]["workerGroupSpecs"][0]["rayStartParams"] == {}


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
@pytest.mark.parametrize("nodes", ["2", "2:4"])
def test_a_ray_cluster_asks_for_a_token_and_all_its_containers_may_do_nothing_special(kind: str, nodes: str) -> None:
    spec = job_of(arguments("--kind", kind, "--rdma", "rdma/hca", *VOLUME), submission(nodes, 8))["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == version("ray"), "KubeRay refuses a token without it"
    # KubeRay adds the autoscaler's container, with this security context or none.
    added = cluster.get("autoscalerOptions", {}).get("securityContext")
    assert added == ({"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}} if ":" in nodes else None)


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
@pytest.mark.parametrize("nodes", ["2", "2:4"])
def test_of_rays_pods_only_an_autoscaling_head_has_a_token_unless_an_account_is_named(kind: str, nodes: str) -> None:
    def tokens(*words: str) -> dict[str, bool | None]:
        spec = job_of(arguments("--kind", kind, *words, *VOLUME), submission(nodes, 8))["spec"]
        cluster = spec.get("rayClusterSpec", spec)
        pods = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}
        found = {name: group["template"]["spec"] for name, group in pods.items()}
        if kind == "rayjob":
            found["submitter"] = spec["submitterPodTemplate"]["spec"]
        return {name: pod.get("automountServiceAccountToken") for name, pod in found.items()}

    submitter = {"submitter": False} if kind == "rayjob" else {}
    assert tokens() == {"head": None if ":" in nodes else False, "worker": False, **submitter}
    assert set(tokens("--service-account", "trainer").values()) == {None}


def test_beside_a_job_lies_a_hostfile_of_its_machines() -> None:
    found = written(arguments("--kind", "job", *VOLUME), submission("2", 8))
    assert found["02-configmap-hostfile.yaml"]["data"]["hostfile"] == (
        "tiny-run-0.tiny-run slots=8\ntiny-run-1.tiny-run slots=8\n"
    )
    assert found["03-service.yaml"]["spec"]["clusterIP"] == "None"
    assert found["04-job.yaml"]["spec"]["template"]["spec"]["subdomain"] == found["03-service.yaml"]["metadata"]["name"]


def test_files_sort_as_they_are_created_and_the_job_is_last() -> None:
    for kind in KINDS:
        run = submission("2", 8)
        args = arguments("--kind", kind, "--volcano-queue", "team", *VOLUME)
        names = [name for name in TARGET.files(run, args) if name.endswith(".yaml")]
        assert names == sorted(names)
        assert names[0] == "01-configmap.yaml"
        assert names[-1].endswith(f"-{kind}.yaml")


def test_what_the_pods_mount_is_the_run_file_and_the_plan() -> None:
    run = submission("2", 8)
    files = TARGET.files(run, arguments("--kind", "pytorchjob", *VOLUME))
    data = written(arguments("--kind", "pytorchjob", *VOLUME), run)["01-configmap.yaml"]["data"]
    assert data == {"run.toml": files["run.toml"], "plan.json": files["plan.json"]}
    assert data["run.toml"] == run.run_file
    assert json.loads(data["plan.json"])["strategy"] == run.config.parallel.strategy


def test_a_plan_too_long_to_be_applied_is_written_shorter_then_loses_tables_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = submission("2", 8, "tiny-run", "parallel.strategy=auto")
    whole = run.files()
    assert documents.run_files(run) == whole
    monkeypatch.setattr(documents, "APPLIED", len(json.dumps(whole)) - 1)
    shorter = documents.run_files(run)["plan.json"]
    assert (json.loads(shorter), shorter.count("\n")) == (json.loads(whole["plan.json"]), 1)
    monkeypatch.setattr(documents, "APPLIED", len(json.dumps({**whole, "plan.json": shorter})) - 1)
    plan = json.loads(documents.run_files(run)["plan.json"])
    assert plan["left_out"].startswith("candidates: ")
    assert "candidates" not in plan["answer"]
    # A long run file can be created, up to what a ConfigMap holds.
    monkeypatch.setattr(documents, "APPLIED", 100)
    assert "ways" not in json.loads(documents.run_files(run)["plan.json"])["answer"]
    monkeypatch.setattr(documents, "ROOM", 100)
    with pytest.raises(documents.UserError, match="more than the 100 bytes"):
        documents.run_files(run)


def test_the_objects_of_a_large_plan_fit_the_annotation_that_kubectl_apply_makes() -> None:
    large = (
        "model.preset=llama3.1-405b",
        "parallel.strategy=auto",
        "data.sequence_length=4096",
        "train.precision=bf16",
    )
    run = submission("64", 8, "tiny-run", *large, "train.global_batch=1024")
    assert len(json.dumps(run.files())) > 210_000, "it is no test otherwise"
    for one in written(arguments("--kind", "job", *VOLUME), run).values():
        # As Go writes JSON; annotations have room for 262,144 bytes in all.
        text = json.dumps(one).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        assert len(text) < 210_000
    plan = json.loads(documents.run_files(run)["plan.json"])
    assert plan["answer"]["best"]["strategy"] == run.config.parallel.strategy


def test_kueue_finds_jobs_suspended_and_labelled() -> None:
    for kind in KINDS:
        one = job_of(arguments("--kind", kind, "--kueue-queue", "team", *VOLUME), submission("2", 8))
        assert one["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
        assert (one["spec"]["runPolicy"] if kind == "pytorchjob" else one["spec"])["suspend"] is True


def test_volcano_is_told_how_many_pods_start_together() -> None:
    words = ("--volcano-queue", "team", *VOLUME)
    group = written(arguments("--kind", "job", *words), submission("2:4", 8))["04-podgroup.yaml"]
    assert group["spec"] == {"minMember": 2, "queue": "team"}
    pods = job_of(arguments("--kind", "job", *words), submission("2:4", 8))["spec"]["template"]
    assert pods["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    assert pods["spec"]["schedulerName"] == "volcano"
    policy = job_of(arguments("--kind", "pytorchjob", *words), submission("2:4", 8))["spec"]["runPolicy"]
    assert policy["schedulingPolicy"] == {"minAvailable": 2, "queue": "team"}


def test_isolated_pods_hear_from_their_own_run_alone() -> None:
    policy = written(arguments("--isolate", *VOLUME), submission())["02-networkpolicy.yaml"]["spec"]
    ours = {"matchLabels": {"app.kubernetes.io/instance": "tiny-run"}}
    assert policy == {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ours}]}]}


def test_the_operator_of_ray_reaches_the_dashboard_of_an_isolated_head_and_nothing_else() -> None:
    policy = written(arguments("--isolate", "--kind", "rayjob", *VOLUME), submission())["02-networkpolicy.yaml"]["spec"]
    ours, operator = policy["ingress"]
    assert ours == {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "tiny-run"}}}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    who = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    assert operator["from"] == [{"namespaceSelector": {}, "podSelector": who}]


def test_a_folder_with_objects_of_another_launch_is_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "02-pytorchjob.yaml").write_text("")
    with pytest.raises(documents.UserError, match="02-pytorchjob.yaml of something else"):
        TARGET.files(submission(), arguments("--dry-run", str(tmp_path), *VOLUME))
    (tmp_path / "02-pytorchjob.yaml").rename(tmp_path / "04-job.yaml")
    TARGET.files(submission(), arguments("--dry-run", str(tmp_path), *VOLUME))
