"""What is given for Kubernetes and cannot be is refused before anything is written, by its option's name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.cluster.recording import record
from meshwright.errors import ConfigError
from meshwright.launch.kubernetes.cluster import TARGET
from meshwright.launch.kubernetes.options import read_options
from meshwright.launch.variables import refuse_taken
from tests.kubernetes_runs import VOLUME, arguments, job_of, submission
from tests.machines import ROCE_GIDS, dgx, roce, switched

REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("--image", ""), "needs --image"),
    (("--image", "Upper/Case:1"), "no image reference"),
    (("--image", "team/meshwright:"), "no image reference"),
    (("--image", "team/meshwright@sha256:12"), "no image reference"),
    (("--image", "team/mesh wright"), "no image reference"),
    (("--namespace", "Team_A"), "--namespace Team_A: a name has small letters"),
    (("--namespace", "team-"), "--namespace team-: a name has small letters"),
    (("--cpu", "32Gi"), "--cpu 32Gi: cores"),
    (("--cpu", "0"), "--cpu 0: cores"),
    (("--memory", "512GB"), "--memory 512GB: memory is a number with"),
    (("--memory", "500m"), "--memory 500m"),
    (("--shm", "lots"), "--shm lots"),
    (("--memory", "4Gi", "--shm", "8Gi"), "--shm 8Gi is part of --memory 4Gi"),
    (("--gpu-resource", "nvidia gpu"), "--gpu-resource: 'nvidia gpu'"),
    (("--gpu-resource", "gpu"), "one has a domain, as nvidia.com/gpu has"),
    (("--rdma", "foo=1"), "--rdma: 'foo' is no resource of devices"),
    (("--rdma", "rdma/hca=no"), "--rdma rdma/hca=no is not RESOURCE"),
    (("--volume", "data"), "is not NAME=pvc:CLAIM:/mount"),
    (("--volume", "data=pvc:claim"), "is not NAME=pvc:CLAIM:/mount"),
    (("--volume", "data=nfs:server:/data"), "is not NAME=pvc:CLAIM:/mount"),
    (("--volume", "data=pvc:claim:data"), "'data' must be an absolute path"),
    (("--volume", "data=pvc:claim:/data/../etc"), "must be an absolute path"),
    (("--volume", "data=pvc:Claim_1:/data"), "'Claim_1' is no name of an object"),
    (("--volume", "shm=pvc:claim:/data"), "taken by the pod itself"),
    (("--volume", "data=pvc:claim:/meshwright/x"), "taken by the pod itself"),
    (("--volume", "more=pvc:claim:/training/inner"), "in each other's way"),
    (("--volume", "data=hostpath:/mnt:/data"), "--allow-host-path"),
    (("--volume", "data=emptydir:big:/data"), "memory is a number"),
    (("--volume", "data=emptydir:/data:ro"), "drop :ro"),
    (("--secret-env", "WANDB_API_KEY=0123456789abcdef"), "takes NAME=SECRET:KEY"),
    (("--secret-env", "WANDB_API_KEY=wandb:a/b"), "no key of a Secret"),
    (("--secret-env", "NCCL_DEBUG=nccl:debug"), "--secret-env and --env both set NCCL_DEBUG"),
    (("--secret-env", "PET_NNODES=a:b"), "--secret-env PET_NNODES is set by whoever starts the run's processes"),
    (("--secret-env", "JOB_COMPLETION_INDEX=a:b"), "--secret-env JOB_COMPLETION_INDEX is set by whoever starts"),
    (("--service-account", "Me"), "no name of an object"),
    (("--run-as-user", "-1"), "--run-as-user -1: 0 is the least"),
    (("--termination-grace", "0"), "--termination-grace 0: 1 is the least"),
    (("--node-selector", "gpu"), "--node-selector gpu is not KEY=VALUE"),
    (("--node-selector", "gpu=a b"), "'a b' is no value of a label"),
    (("--toleration", "gpu:Never"), "an effect is NoSchedule"),
    (("--topology-key", "a/b/c"), "no key of a label"),
    (("--kueue-queue", "a", "--volcano-queue", "b"), "exclude each other"),
    (("--kueue-queue", "q" * 64), "no value of a label"),
    (("--trainer-version", "2.1"), "--trainer-version is for --kind trainjob, and this is --kind job"),
    (("--head-memory", "16Gi", "--kind", "pytorchjob"), "--head-memory is for --kind rayjob, raycluster"),
    (("--ttl-after-finished", "60", "--kind", "trainjob"), "--ttl-after-finished is for --kind job"),
    (("--backoff-limit", "1", "--kind", "raycluster"), "--backoff-limit is for --kind job"),
    (("--backoff-limit", "1", "--kind", "pytorchjob"), "--backoff-limit is for --kind job, trainjob, rayjob"),
    (("--kube-version", "1.38"), "releases from 1.25 to 1.37 are known; say 1.37, whose fields newer ones take"),
    (("--kube-version", "1.24"), "releases from 1.25 to 1.37"),
    (("--kube-version", "latest"), "releases from 1.25 to 1.37"),
    (("--kind", "trainjob", "--trainer-version", "2.0", "--volcano-queue", "team"), "knows Volcano since 2.1"),
    (("--workdir", "relative"), "--workdir: 'relative' must be an absolute path"),
    (("--hardware", "/nowhere"), "--hardware /nowhere is no recording"),
    (("--head-cpu", "two", "--kind", "rayjob"), "--head-cpu two"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_bad_word_is_refused_by_its_option(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_options(arguments(*VOLUME, *words), submission())
    assert message in str(refusal.value)


def test_an_old_release_is_not_answered_with_advice_for_a_new_one() -> None:
    with pytest.raises(ConfigError) as refusal:
        read_options(arguments(*VOLUME, "--kube-version", "1.24"), submission())
    assert str(refusal.value) == "--kube-version 1.24: releases from 1.25 to 1.37 are known"


def test_namespaces_and_volumes_may_begin_with_a_digit() -> None:
    words = ("--namespace", "3d-team", "--volume", "2nd=pvc:second:/second", *VOLUME)
    assert job_of(arguments(*words), submission())["metadata"]["namespace"] == "3d-team"


@pytest.mark.parametrize("kind", ["rayjob", "raycluster"])
def test_a_ray_machine_has_a_cpu_for_each_rank(kind: str) -> None:
    for few in ("4", "7000m"):
        with pytest.raises(ConfigError, match=f"--cpu {few}: each of the 8 ranks of a machine takes one CPU"):
            read_options(arguments("--kind", kind, "--cpu", few, *VOLUME), submission("2", 8))
    # KubeRay tells Ray of whole ones.
    assert read_options(arguments("--kind", kind, "--cpu", "7001m", *VOLUME), submission("2", 8)).cpu == "7001m"
    assert read_options(arguments("--kind", "job", "--cpu", "4", *VOLUME), submission("2", 8)).cpu == "4"


def test_a_secret_given_by_value_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refusal:
        read_options(arguments(*VOLUME, "--secret-env", "HF_TOKEN=hf_0123456789"), submission())
    assert "hf_0123456789" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "nodes", "words", "message"),
    [
        ("trainjob", "2:4", (), "a TrainJob has a fixed number of machines"),
        ("job", "2:4", ("--kube-version", "1.30"), "successPolicy"),
        ("rayjob", "2:4", ("--kueue-queue", "team"), "Kueue admits a Ray cluster of one size"),
    ],
)
def test_ranges_of_machines_are_refused_where_they_cannot_be(
    kind: str, nodes: str, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(arguments("--kind", kind, *words, *VOLUME), submission(nodes, 8))


@pytest.mark.parametrize("name", ["Upper", "1st", "under_score", "a" * 41, "-dash", "dash-"])
def test_names_that_are_no_dns_labels_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        read_options(arguments(*VOLUME), submission("2", 0, name))


@pytest.mark.parametrize(
    ("setting", "volume", "message"),
    [
        (
            "run.dir=/elsewhere/run",
            VOLUME,
            "run.dir=/elsewhere/run lies on no volume of the pods: add --volume runs=pvc:",
        ),
        ("run.dir=s3://bucket/run", VOLUME[:0], "run.dir=s3://bucket/run"),
        ("run.dir=../run", VOLUME, "run.dir=../run (/run in the pods) lies on no volume"),
        ("data.path=/corpora/x", VOLUME, "data.path=/corpora/x lies on no volume of the pods: add --volume data=pvc:"),
        ("checkpoint.dir=/fast/x", VOLUME, "checkpoint.dir=/fast/x lies on no volume"),
        ("checkpoint.dir=/fast/x", (*VOLUME, "--volume", "fast=emptydir:/fast"), "an emptydir, which begins empty"),
        ("checkpoint.dir=/fast/x", (*VOLUME, "--volume", "fast=pvc:fast:/fast:ro"), "mounted :ro; drop the :ro"),
        ("data.path=/corpora/x", (*VOLUME, "--volume", "c=emptydir:/corpora"), "an emptydir, which begins empty"),
        ("data.tokenizer=/tok/tokenizer.json", VOLUME, "data.tokenizer=/tok/tokenizer.json lies on no volume"),
    ],
)
def test_folders_that_pods_would_not_see_or_would_lose_are_refused(
    setting: str, volume: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_options(arguments(*volume), submission("2", 0, "tiny-run", setting))
    assert message in str(refusal.value)


def test_relative_folders_begin_at_the_first_claim_that_can_be_written() -> None:
    words = ("--volume", "data=pvc:corpora:/data:ro", *VOLUME)
    assert read_options(arguments(*words), submission()).home == "/training"
    stored = submission("2", 0, "tiny-run", "checkpoint.dir=s3://bucket/run")
    assert read_options(arguments(*words), stored).home == "/training"


def test_variables_of_launchers_cannot_be_given() -> None:
    run = submission()
    taken = ("JOB_COMPLETION_INDEX", "MESHWRIGHT_REPLICA_INDEX", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "FQ_RAY_IP")
    for name in ("PET_NNODES", "RANK", "MASTER_ADDR", *taken):
        given = type(run)(run.name, run.config, run.machines, environment={name: "1"})
        with pytest.raises(ConfigError, match=f"--env {name}"):
            TARGET.files(given, arguments(*VOLUME))


def test_no_variable_that_objects_refer_to_can_be_given() -> None:
    """A $(NAME) in a command is what the environment says, whoever said it."""
    for kind, nodes in (("job", "2"), ("pytorchjob", "2"), ("pytorchjob", "2:4"), ("trainjob", "2"), ("rayjob", "2")):
        text = "".join(TARGET.files(submission(nodes, 8), arguments("--kind", kind, *VOLUME)).values())
        for name in set(re.findall(r"\$\((\w+)\)", text)):
            with pytest.raises(ConfigError, match=f"--env {name} is set by"):
                refuse_taken("--env", name, "kubernetes")


def test_nccl_settings_of_a_recorded_machine_are_in_the_files(tmp_path: Path) -> None:
    dgx(tmp_path)
    words = ("--hardware", str(tmp_path), *VOLUME)
    options = read_options(arguments(*words), submission("2", 8))
    env = job_of(arguments(*words), submission("2", 8))["spec"]["template"]["spec"]["containers"][0]["env"]
    assert options.nccl["NCCL_IB_HCA"].startswith("=mlx5_0,mlx5_3")
    assert not [name for name in options.nccl if name.endswith("IFNAME")], "pods have interfaces of their own"
    assert options.nccl.items() <= {one["name"]: one.get("value") for one in env}.items()
    assert "NCCL_DEBUG" not in options.nccl
    file = tmp_path / "dgx.json"
    file.write_text(record(tmp_path), encoding="utf-8")
    assert read_options(arguments("--hardware", str(file), *VOLUME), submission("2", 8)).nccl == options.nccl


def test_names_that_a_recording_replaced_are_no_settings(tmp_path: Path) -> None:
    machine = roce(tmp_path / "root")
    place, numa = switched(0, slot=2)
    machine.rdma("rocexb8599f0300c7b0aa", place, numa, layer="Ethernet", rate="100 Gb/sec (4X EDR)", gids=ROCE_GIDS)
    machine.finish()
    file = tmp_path / "recording.json"
    file.write_text(record(tmp_path / "root"))
    chosen = read_options(arguments("--hardware", str(tmp_path / "root"), *VOLUME), submission("2", 8)).nccl
    assert "rocexb8599f0300c7b0aa" in chosen["NCCL_IB_HCA"]
    with pytest.raises(ConfigError, match="NCCL_IB_HCA would be .*rocex0000000000000001"):
        read_options(arguments("--hardware", str(file), *VOLUME), submission("2", 8))
