"""No key of a foreign configuration is passed over in silence, whatever stands beside it."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.interop.deepspeed import translate as read_deepspeed
from meshwright.interop.deepspeed_rules import RULES as DEEPSPEED
from meshwright.interop.megatron import translate as read_megatron
from meshwright.interop.megatron_rules import RULES as MEGATRON
from meshwright.interop.rules import Rule
from meshwright.interop.translation import UNREAD, Around, Reading

SHAPE = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "64",
    "--vocab-size": "1000",
}
WORDS = {
    "--optimizer": ["adam", "sgd"],
    "--normalization": ["RMSNorm"],
    "--position-embedding-type": ["rope", "learned_absolute"],
    "--tokenizer-type": ["GPT2BPETokenizer"],
    "--moe-router-load-balancing-type": ["none", "aux_loss"],
    "--recompute-granularity": ["full", "selective"],
    "--recompute-method": ["block", "uniform"],
    "--data-parallel-sharding-strategy": ["optim", "optim_grads"],
    "--cp-comm-type": ["p2p", "a2a"],
    "--lr-decay-style": ["cosine", "WSD"],
    "--lr-wsd-decay-style": ["linear"],
    "--split": ["9,1,0"],
    "--window-size": ["(3,0)"],
    "--exp-avg-dtype": ["fp32"],
    "--moe-layer-freq": ["1"],
    "optimizer.type": ["AdamW", "SGD", "Adafactor"],
    "scheduler.type": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
    "scheduler.params.warmup_type": ["log", "linear"],
    "torch_autocast.dtype": ["bf16"],
    "communication_data_type": ["fp32"],
    "zero_optimization.offload_optimizer.device": ["cpu", "none"],
    "zero_optimization.offload_param.device": ["cpu", "none"],
}
"""Words that mean something; others have any."""
NUMBERS = [-1, 0, 1, 2, 4, 10**18, math.inf, math.nan]
READ_TOGETHER = {
    dialect: [rule for rule in rules if not rule.ours.startswith(("refused", "not applicable"))]
    for dialect, rules in (("megatron", MEGATRON), ("deepspeed", DEEPSPEED))
}


def values(rule: Rule) -> st.SearchStrategy[Any]:
    found = _values(rule)
    return found if rule.key.startswith("--") else found | st.just("auto")


def _values(rule: Rule) -> st.SearchStrategy[Any]:
    if rule.key in WORDS:
        return st.sampled_from(WORDS[rule.key])
    match rule.kind:
        case "bool":
            return st.booleans()
        case "int":
            return st.sampled_from(NUMBERS)
        case "number":
            return st.sampled_from([*NUMBERS, 0.5])
    return st.just("word")


def files(rules: list[Rule]) -> st.SearchStrategy[dict[str, Any]]:
    chosen = st.lists(st.sampled_from(rules), max_size=len(rules) // 3, unique_by=lambda rule: rule.key)
    return chosen.flatmap(lambda found: st.fixed_dictionaries({rule.key: values(rule) for rule in found}))


def told_of(content: dict[str, Any], read: Any) -> None:
    """Without the keys that are refused, until a file is read: then each of its keys is in the table."""
    while True:
        try:
            found = read(content)
        except ConfigError as error:
            message = str(error)
            assert UNREAD not in message, message
            refused = {line.split()[0] for line in message.splitlines()[1:]}
            left = {key: value for key, value in content.items() if not any(key.startswith(one) for one in refused)}
            if left == content:
                return
            content = left
            continue
        assert content.keys() <= {entry.key for entry in found.entries}
        return


def megatron(content: dict[str, Any], **base: Any) -> Any:
    shown = {"--data-path": "a"}
    text = " ".join(
        flag if value is True else f"{flag} {shown.get(flag, value)}"
        for flag, value in content.items()
        if value is not False
    )
    return read_megatron(text, "flags", Around(RunConfig.model_validate(base), 8))


def deepspeed(content: dict[str, Any]) -> Any:
    nested: dict[str, Any] = {}
    for key, value in content.items():
        *tables, name = key.split(".")
        table = nested
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return read_deepspeed(nested, "ds.json", Around(RunConfig(), 8))


@settings(max_examples=400, deadline=None)
@given(files(READ_TOGETHER["megatron"]), st.booleans(), st.booleans())
def test_each_flag_of_any_file_is_in_the_table_or_refused(content: dict[str, Any], shaped: bool, taken: bool) -> None:
    content = {flag: value for flag, value in content.items() if value is not False}
    base: dict[str, Any] = {"model": {"preset": "tiny"}} if taken and not shaped else {}
    told_of({**content, **SHAPE} if shaped else content, lambda flags: megatron(flags, **base))


@settings(max_examples=400, deadline=None)
@given(files(READ_TOGETHER["deepspeed"]))
def test_each_key_of_any_ds_config_is_in_the_table_or_refused(content: dict[str, Any]) -> None:
    told_of(content, deepspeed)


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("rule", MEGATRON, ids=lambda rule: rule.key)
def test_flag_alone_is_in_the_table_or_refused(rule: Rule, shaped: bool) -> None:
    value = {"bool": True, "int": "2", "number": "0.5"}.get(rule.kind, WORDS.get(rule.key, ["word"])[0])
    base: dict[str, Any] = {} if shaped else {"model": {"preset": "tiny"}}
    told_of({**(SHAPE if shaped else {}), rule.key: value}, lambda flags: megatron(flags, **base))


def test_key_that_nothing_read_is_refused() -> None:
    reading = Reading("megatron", "flags", given={"--new", "--seed"})
    reading.map("--seed", 1, "run.seed", 1)
    with pytest.raises(ConfigError, match=re.escape(f"--new {UNREAD}")):
        reading.finish(Around(RunConfig()))
