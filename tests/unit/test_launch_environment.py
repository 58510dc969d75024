"""Secrets in --env are refused by their name, their place or their form, and not shown."""

from __future__ import annotations

import pytest

from meshwright.cli.launch import TARGETS, _environment
from meshwright.errors import ConfigError
from meshwright.secrets import holds_secret

SECRETS = {
    "API_TOKEN": "anything",
    "DATABASE_URL": "postgres://bob:hunter2@db/x",
    "HTTPS_PROXY": "http://someone:word@proxy:3128",
    "FEED": "https://example.com/a?x=1&access_token=abcdefgh",
    "HEADER": "Authorization: Bearer abcdefgh12345678",
    "NOTE": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "WHO": "it is ghp_0123456789abcdefghij0123456789abcdef",
    "MODEL_KEY": "sk-proj-abcdefghijklmnopqrstuvwx",
    "STORE": "AKIAIOSFODNN7EXAMPLE",
    "CLAIM": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "PEM": "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
    "DSN": "host=x password=y",
    "DSN_URL": "postgres://db/x password=hunter2",
    "ODBC": "Server=db;Uid=bob;Pwd=hunter2;",
    "JAVA_OPTS": "-Xmx1g -Dstore.password=hunter2",
    "ARGS": "--token=abc --verbose",
    "CLIENT": "id=1, client_secret = 'x'",
    "SETTINGS": '{"user": "bob", "password": "hunter2"}',
    "REMOTE": "access_token=abc",
    "PIN": "password=123456",
}
ORDINARY = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "=mlx5_0,mlx5_3",
    "HTTPS_PROXY": "http://proxy.example.com:3128",
    "HF_HOME": "/data/hf_cache_of_the_whole_team",
    "PYTHONPATH": "/opt/sk-learn-extensions/src:/opt/task-runner-of-the-team",
    "COMMIT": "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "MAIL": "someone@example.com",
    "STORE": "s3://bucket/runs?region=eu",
    "TOKENS": "max_tokens=512 pad_token=<pad> eos_token=</s> bos_token=1",
    "VLLM": "--max-num-batched-token=8192 tokenizer=bytes",
    "WHERE": "password_file=/run/secrets/db secret=/run/secrets/x PWD=/home/me/work",
    "NAMED": "password=$DB_PASSWORD token=${TOKEN} secret=***",
    "SWITCH": '{"token": true, "password": null, "secret": ""} password= token=false',
    "WORDS": "the secret of a good password",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_by_value_is_refused_and_not_shown(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--env {name}: secrets go by reference") as refusal:
        _environment([f"{name}={SECRETS[name]}"], "local")
    assert SECRETS[name] not in str(refusal.value)


def test_a_secret_of_this_shell_is_refused_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with pytest.raises(ConfigError, match="--env NOTE: secrets go by reference"):
        _environment(["NOTE=my 0123456789abcdef"], "local")


@pytest.mark.parametrize("target", TARGETS)
def test_a_refusal_says_how_a_secret_is_passed_instead(target: str) -> None:
    told = {"local": "export it in this shell", "hosts": "SendEnv=HF_TOKEN {host}", "slurm": "export it in this shell",
            "kubernetes": "--secret-env HF_TOKEN=SECRET:KEY", "ray": "where Ray is started"}  # fmt: skip
    with pytest.raises(ConfigError) as refusal:
        _environment(["HF_TOKEN=x"], target)
    assert told[target] in str(refusal.value)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((target, "RANK") for target in TARGETS),
        *((target, "MESHWRIGHT_RANK_LOGS") for target in ("local", "hosts", "slurm")),
        ("slurm", "SLURM_JOB_ID"),
        ("kubernetes", "JOB_COMPLETION_INDEX"),
        ("ray", "RAY_JOB_STOP_WAIT_TIME_S"),
    ],
)
def test_what_a_target_sets_or_reads_itself_cannot_be_given(target: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--env {name} is set by whoever starts"):
        _environment([f"{name}=0"], target)
    assert _environment([f"MY_{name}=0"], target)


@pytest.mark.parametrize("word", ["NAME", "=x", "2A=x", "A-B=x", "\u00e9=x"])
def test_what_no_shell_exports_is_no_variable(word: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME=VALUE"):
        _environment([word], "local")


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_values_are_taken(name: str) -> None:
    assert not holds_secret(ORDINARY[name])
    assert _environment([f"{name}={ORDINARY[name]}"], "local") == {name: ORDINARY[name]}
