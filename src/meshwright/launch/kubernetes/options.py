"""The options of --on kubernetes, read once and checked: what they say, not yet what is written. No torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cluster.recording import has_replaced, opened
from meshwright.cluster.sysfs import read_hardware
from meshwright.comm.nccl_profile import nccl_profile
from meshwright.comm.nccl_variables import given_settings
from meshwright.errors import ConfigError
from meshwright.launch.kubernetes import words
from meshwright.launch.kubernetes.versions import USUAL, Release
from meshwright.launch.kubernetes.volumes import Volume, check_places, home_of, parse_volumes
from meshwright.launch.submission import Submission
from meshwright.launch.variables import refuse_taken

KINDS = ("job", "pytorchjob", "trainjob", "rayjob", "raycluster")
TRAINER_RELEASES = ("2.0", "2.1", "2.2", "2.3")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TTL_S = {"job": 7 * 24 * 3600, "pytorchjob": 7 * 24 * 3600, "rayjob": 0}
"""How long what has ended stays. Of a RayJob that is its cluster, which holds GPUs as long as it is there."""
_TRAINER, _HEAD_CPU, _HEAD_MEMORY = "2.3", "2", "8Gi"
_ONLY_FOR: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("--trainer-version", _TRAINER, ("trainjob",)),
    ("--head-cpu", _HEAD_CPU, ("rayjob", "raycluster")),
    ("--head-memory", _HEAD_MEMORY, ("rayjob", "raycluster")),
    ("--ttl-after-finished", None, tuple(_TTL_S)),
    ("--backoff-limit", None, ("job", "trainjob", "rayjob")),
)
"""Options that not every kind has, their defaults, and who has them."""


def describe(group: argparse._ArgumentGroup) -> None:
    """Add them to the command line."""
    add = group.add_argument
    add("--kind", choices=KINDS, default="job", help="what is submitted (default job, which needs no operator)")
    add("--image", metavar="IMAGE", help="container image that has meshwright in it; required")
    add("--namespace", default="default", metavar="NS", help="(default %(default)s)")
    add("--kube-context", metavar="NAME", help="of the kubeconfig (default its current one)")
    add("--kube-version", default=USUAL, metavar="1.N", help="write only fields that this release has (%(default)s)")
    add("--trainer-version", default=_TRAINER, choices=TRAINER_RELEASES, help="Kubeflow Trainer's, for trainjob")
    add(
        *("--volume",),
        action="append",
        default=[],
        metavar="NAME=pvc:CLAIM:/mount[:ro]",
        help="storage of the pods; also NAME=emptydir[:SIZE]:/mount, NAME=hostpath:/folder:/mount; repeatable",
    )
    add("--allow-host-path", action="store_true", help="let --volume open folders of the machines")
    add("--cpu", metavar="CORES", help="of each pod, such as 32 or 500m (default: none is asked for)")
    add("--memory", metavar="SIZE", help="of each pod, such as 512Gi (default: none is asked for)")
    add("--shm", default="8Gi", metavar="SIZE", help="of /dev/shm, part of the memory (default %(default)s)")
    add("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="what a GPU is called (default %(default)s)")
    add("--rdma", metavar="RESOURCE[=N]", help="devices for RDMA, such as rdma/hca=1; adds IPC_LOCK")
    told = "a machine's recording (meshwright doctor --record), or tree: its NCCL settings go into the pods"
    add("--hardware", type=Path, metavar="PATH", help=told)
    add(
        *("--secret-env",),
        action="append",
        default=[],
        metavar="NAME=SECRET:KEY",
        help="a variable from a Secret of the namespace; repeatable",
    )
    add("--image-pull-secret", action="append", default=[], metavar="SECRET", help="to fetch the image; repeatable")
    add("--service-account", metavar="NAME", help="of the pods (default none: they get no token)")
    add("--isolate", action="store_true", help="a NetworkPolicy: only the run's own pods reach its pods")
    add("--run-as-user", type=int, default=1000, metavar="UID", help="of the processes (default %(default)s)")
    add("--termination-grace", type=int, default=120, metavar="S", help="time to save when stopped (%(default)s)")
    add("--backoff-limit", type=int, metavar="N", help="failures of a machine's pod (10), of a whole RayJob (2)")
    add(
        "--ttl-after-finished",
        type=int,
        metavar="S",
        help="the job is removed after its end (a week), a RayJob's cluster (0: GPUs are free at once)",
    )
    add("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="machines to take; repeatable")
    add("--toleration", action="append", default=[], metavar="KEY[=VALUE][:EFFECT]", help="taints to bear; repeatable")
    add("--topology-key", metavar="KEY", help="label whose value pods should share, such as a rack's")
    add("--priority-class", metavar="NAME", help="of the pods")
    add("--kueue-queue", metavar="NAME", help="wait suspended until Kueue admits it to this queue")
    add("--volcano-queue", metavar="NAME", help="scheduled by Volcano, all pods at once, in this queue")
    add(
        "--head-cpu",
        default=_HEAD_CPU,
        metavar="CORES",
        help="of a Ray head, which trains nothing (default %(default)s)",
    )
    add("--head-memory", default=_HEAD_MEMORY, metavar="SIZE", help="of a Ray head (default %(default)s)")


@dataclass(frozen=True)
class Options:
    """What was asked for; every word has been checked."""

    kind: str
    image: str
    python: str
    namespace: str
    context: str | None
    release: Release
    trainer: str
    volumes: tuple[Volume, ...]
    home: str
    cpu: str | None
    memory: str | None
    shm: str
    gpu_resource: str
    rdma: tuple[str, int] | None
    secrets: tuple[tuple[str, str, str], ...]
    """Variable, Secret, key."""
    nccl: dict[str, str]
    pull_secrets: tuple[str, ...]
    account: str | None
    isolated: bool
    user: int
    grace: int
    backoff: int
    ttl: int
    selector: dict[str, str]
    tolerations: tuple[dict[str, Any], ...]
    topology: str | None
    priority: str | None
    kueue: str | None
    volcano: str | None
    head: tuple[str, str]
    """Cores and memory of a Ray head."""

    @property
    def is_ray(self) -> bool:
        """Whether Ray starts the processes."""
        return self.kind in ("rayjob", "raycluster")


def read_options(args: argparse.Namespace, submission: Submission) -> Options:
    """Check them against each other and the run."""
    if not args.image:
        raise ConfigError("--on kubernetes needs --image: a container image that has meshwright in it")
    for option, default, kinds in _ONLY_FOR:
        if args.kind not in kinds and getattr(args, option[2:].replace("-", "_")) != default:
            raise ConfigError(f"{option} is for --kind {', '.join(kinds)}, and this is --kind {args.kind}; drop it")
    words.run_name("--name", submission.name)
    volumes = parse_volumes(args.volume, args.allow_host_path)
    home = home_of(volumes, args.workdir)
    check_places(submission.config, volumes, home)
    options = Options(
        kind=args.kind,
        image=words.image("--image", args.image),
        python=args.python or "python",
        namespace=words.label("--namespace", args.namespace),
        context=args.kube_context,
        release=Release.parse("--kube-version", args.kube_version),
        trainer=args.trainer_version,
        volumes=volumes,
        home=home,
        cpu=args.cpu and words.cpu("--cpu", args.cpu),
        memory=args.memory and words.memory("--memory", args.memory),
        shm=words.memory("--shm", args.shm),
        gpu_resource=words.resource("--gpu-resource", args.gpu_resource),
        rdma=_rdma(args.rdma),
        secrets=tuple(_secret(word) for word in args.secret_env),
        nccl=_nccl(args.hardware, submission),
        pull_secrets=tuple(words.object_name("--image-pull-secret", name) for name in args.image_pull_secret),
        account=args.service_account and words.object_name("--service-account", args.service_account),
        isolated=args.isolate,
        user=_at_least(0, "--run-as-user", args.run_as_user),
        grace=_at_least(1, "--termination-grace", args.termination_grace),
        backoff=_at_least(0, "--backoff-limit", args.backoff_limit)
        if args.backoff_limit is not None
        else (2 if args.kind == "rayjob" else 10),
        ttl=_at_least(0, "--ttl-after-finished", args.ttl_after_finished)
        if args.ttl_after_finished is not None
        else _TTL_S.get(args.kind, 0),
        selector=dict(_selector(word) for word in args.node_selector),
        tolerations=tuple(_toleration(word) for word in args.toleration),
        topology=args.topology_key and words.label_key("--topology-key", args.topology_key),
        priority=args.priority_class and words.object_name("--priority-class", args.priority_class),
        kueue=args.kueue_queue and words.queue("--kueue-queue", args.kueue_queue),
        volcano=args.volcano_queue and words.queue("--volcano-queue", args.volcano_queue),
        head=(words.cpu("--head-cpu", args.head_cpu), words.memory("--head-memory", args.head_memory)),
    )
    _check(options, submission)
    return options


def _check(options: Options, submission: Submission) -> None:
    """What does not go together."""
    if options.memory and words.in_bytes(options.shm) > words.in_bytes(options.memory):
        raise ConfigError(f"--shm {options.shm} is part of --memory {options.memory} and cannot be more")
    if options.kueue and options.volcano:
        raise ConfigError("--kueue-queue and --volcano-queue exclude each other; leave one of them out")
    for name in submission.environment:
        refuse_taken("--env", name, "kubernetes")
    twice = {name for name, _, _ in options.secrets} & (set(submission.environment) | set(options.nccl))
    if twice:
        raise ConfigError(f"--secret-env and --env both set {', '.join(sorted(twice))}; leave one of them out")
    elastic = submission.machines.least < submission.machines.most
    if elastic and options.kind == "trainjob":
        raise ConfigError(
            f"--nodes {submission.machines.range}: a TrainJob has a fixed number of machines; say one number, or take "
            "--kind pytorchjob, job or rayjob"
        )
    if elastic and options.kind == "job" and not options.release.has("successPolicy"):
        raise ConfigError(
            f"--nodes {submission.machines.range}: a Job ends with fewer machines than it asked for by its "
            f"successPolicy, which Kubernetes {options.release} has not; say one number, --kube-version 1.31, or "
            "--kind pytorchjob"
        )
    if elastic and options.is_ray and options.kueue:
        raise ConfigError(
            f"--nodes {submission.machines.range} with --kueue-queue: Kueue admits a Ray cluster of one size; say one "
            "number"
        )
    ranks = submission.machines.processes
    if options.is_ray and options.cpu and words.whole_cores(options.cpu) < ranks:
        raise ConfigError(
            f"--cpu {options.cpu}: each of the {ranks} ranks of a machine takes one CPU of Ray's; say --cpu {ranks} or "
            "more, or take fewer --processes-per-node"
        )
    if options.kind == "trainjob" and options.volcano and options.trainer == "2.0":
        raise ConfigError("--volcano-queue: Kubeflow Trainer knows Volcano since 2.1; --trainer-version says 2.0")


def _at_least(least: int, option: str, value: int) -> int:
    if value < least:
        raise ConfigError(f"{option} {value}: {least} is the least")
    return value


def _rdma(word: str | None) -> tuple[str, int] | None:
    if word is None:
        return None
    name, given, count = word.partition("=")
    if given and (not count.isdecimal() or int(count) < 1):
        raise ConfigError(f"--rdma {word} is not RESOURCE or RESOURCE=NUMBER, such as rdma/hca=1")
    return words.resource("--rdma", name), int(count) if given else 1


def _secret(word: str) -> tuple[str, str, str]:
    name, given, rest = word.partition("=")
    secret, colon, key = rest.partition(":")
    if not (given and colon and name.isidentifier()):
        # The word is not shown: what stands there may be the secret itself.
        raise ConfigError(
            f"--secret-env {name if name.isidentifier() else '...'}: it takes NAME=SECRET:KEY, a Secret of the "
            "namespace and a key in it, never the value"
        )
    refuse_taken("--secret-env", name, "kubernetes")
    option = f"--secret-env {name}"
    return name, words.object_name(option, secret), words.secret_key(option, key)


def _selector(word: str) -> tuple[str, str]:
    key, given, value = word.partition("=")
    if not given:
        raise ConfigError(f"--node-selector {word} is not KEY=VALUE")
    option = f"--node-selector {word}"
    return words.label_key(option, key), words.label_value(option, value)


def _toleration(word: str) -> dict[str, Any]:
    taint, _, effect = word.partition(":")
    key, given, value = taint.partition("=")
    option = f"--toleration {word}"
    if effect and effect not in _EFFECTS:
        raise ConfigError(f"{option}: an effect is {', '.join(_EFFECTS)}")
    found: dict[str, Any] = {"key": words.label_key(option, key), "operator": "Equal" if given else "Exists"}
    if given:
        found["value"] = words.label_value(option, value)
    return found | ({"effect": effect} if effect else {})


def _nccl(path: Path | None, submission: Submission) -> dict[str, str]:
    """NCCL's settings for a recorded machine, but for what --env says."""
    if path is None:
        return {}
    if not path.is_file() and not (path / "sys").is_dir():
        wanted = "no recording of `meshwright doctor --record`, and no folder with a machine's /sys and /proc"
        raise ConfigError(f"--hardware {path} is {wanted} (docs/doctor.md)")
    with opened(path) as root:
        given = given_settings(submission.environment, root)
        chosen = nccl_profile(read_hardware(root), given, machines=submission.machines.most).environment()
    # A pod's interfaces have names of their own, which it finds out when it starts.
    chosen = {name: value for name, value in chosen.items() if not name.endswith("_SOCKET_IFNAME")}
    for name, value in chosen.items():
        if has_replaced(value):
            why = "names that the recording has in the place of hardware addresses"
            raise ConfigError(f"--hardware {path}: {name} would be {value}, with {why}; set it with --env {name}=...")
    return chosen
