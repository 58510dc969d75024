"""How a Hugging Face model is split by tensor parallel: what it says of itself (`tp_plan`) as a table of ours.

Their table names linear layers one by one; everything that it does not name is held whole by every rank. What a model
does not say, or says in words that are not known here, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from meshwright.errors import ConfigError
from meshwright.models.expert_cuts import cut_of
from meshwright.models.tensor_plan import entry_of

STYLES = {
    "colwise": "outputs",
    "colwise_gather_output": "outputs-whole",
    "colwise_rep": "outputs-whole",
    "rowwise": "inputs",
    "rowwise_split_input": "inputs-own",
    "replicated_with_grad_allreduce": "shared",
    "embedding_rowwise": "vocabulary",
    "sequence_parallel": "tokens",
    "replicate": "tokens",
    "moe_tp_experts": "experts-summed",
}
_DROPOUTS = ("dropout", "pdrop", "drop_rate", "jitter_noise")
_ELSEWHERE = ("classifier_dropout", "summary_first_dropout")
"""Of heads that a language model does not have."""


def hugging_face_plan(model: Any, tp: int) -> dict[str, str] | None:
    """The table for so many ranks; None for what is no Hugging Face model, or has none."""
    theirs = getattr(model, "tp_plan", None)
    if not isinstance(theirs, dict) or not theirs or not hasattr(model, "config"):
        return None
    kind, config = type(model).__name__, model.config.get_text_config()
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for pattern, style in theirs.items():
        named = [name for name in modules if fnmatchcase(name, pattern)]
        if not named:
            continue
        if style not in STYLES:
            raise ConfigError(
                f"{kind} asks for the style '{style}' for {named[0]}, which tp does not know; use tp=1 with zero=3"
            )
        found[pattern] = _fitting(STYLES[style], [modules[name] for name in named], tp)
    _check(kind, config, found, modules, tp)
    _check_experts(kind, found, theirs, modules)
    return {**_tied_alike(found, modules), "*": "tokens"}


def _fitting(rule: str, modules: list[Any], tp: int) -> str:
    """What cannot be cut evenly and gathered is held whole, and so is an embedding that does more than look up."""
    if rule == "outputs-whole" and any(module.out_features % tp for module in modules):
        return "tokens"
    if rule == "vocabulary" and any(type(module).__name__ != "Embedding" for module in modules):
        return "tokens"
    return rule


def _tied_alike(plan: dict[str, str], modules: dict[str, Any]) -> dict[str, str]:
    """Modules that share a weight are held whole unless all of them cut its rows."""
    rows = ("vocabulary", "outputs-whole")
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        if (weight := getattr(module, "weight", None)) is not None:
            pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), "")
            sharing.setdefault(id(weight), []).append(pattern)
    whole = {
        pattern
        for patterns in sharing.values()
        if len(patterns) > 1 and any(plan.get(pattern) not in rows for pattern in patterns)
        for pattern in patterns
    }
    return {pattern: "tokens" if pattern in whole else rule for pattern, rule in plan.items()}


def _check(kind: str, config: Any, plan: dict[str, str], modules: dict[str, Any], tp: int) -> None:
    for pattern, rule in plan.items():
        for name, module in modules.items():
            linear = rule in ("outputs", "outputs-whole", "inputs", "inputs-own")
            if linear and fnmatchcase(name, pattern) and not hasattr(module, "in_features"):
                raise ConfigError(f"{name} of {kind} is a {type(module).__name__}, which tp cannot cut; use tp=1")
    _refuse_between(kind, plan, modules)
    for name, module in modules.items():
        if type(module).__name__ == "Conv1d":
            raise ConfigError(
                f"{kind} has a convolution, {name}, whose weights are read by code around it: tp cannot hold it; "
                "use tp=1 with zero=3"
            )
    cut = any(rule == "outputs" and "att" in pattern for pattern, rule in plan.items())
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if cut and isinstance(heads, int) and heads % tp:
            raise ConfigError(f"tp={tp} does not divide {key}={heads} of {kind}; use a divisor of it")
    if dropped := next(_dropouts(config), None):
        raise ConfigError(
            f"{kind} has {dropped}: ranks of tp would each draw other numbers; set it to 0, or use tp=1 with zero=3"
        )


def _check_experts(kind: str, plan: dict[str, str], theirs: dict[str, str], modules: dict[str, Any]) -> None:
    """Refuse experts whose parameters their table would cut in other ways than their code lays them out."""
    for name, module in modules.items():
        if entry_of(plan, name) != "experts-summed":
            continue
        for parameter, value in module.named_parameters():
            style = entry_of(theirs, f"{name}.{parameter}")
            cut = cut_of(module, parameter)
            if style is None or cut is None or style != cut.style(value.ndim):
                raise ConfigError(
                    f"{kind} asks for the style '{style}' for {name}.{parameter}, which tp cannot follow for experts "
                    "that are laid out so; use tp=1 with zero=3"
                )


def _refuse_between(kind: str, plan: dict[str, str], modules: dict[str, Any]) -> None:
    """Refuse parameters beside split layers that the table does not name: whether each rank sees all of their gradient
    or a part of it cannot be told."""
    cut = {
        name.rpartition(".")[0]
        for name in modules
        if any(rule == "outputs" and fnmatchcase(name, pattern) for pattern, rule in plan.items())
    }
    for name, module in modules.items():
        above = name.rpartition(".")[0]
        beside = (
            name if above in cut and entry_of(plan, name) is None and any(True for _ in module.parameters()) else ""
        )
        if name in cut:
            beside = next((f"{name}.{held}" for held, _ in module.named_parameters(recurse=False)), beside)
        if beside:
            raise ConfigError(
                f"{kind} does not say how tp treats {beside}, which has parameters beside layers that are split; "
                "use tp=1 with zero=3, or give the class a `tensor_plan` (docs/strategies.md)"
            )


def _dropouts(config: Any) -> Iterator[str]:
    for key, value in sorted(config.to_dict().items()):
        if key.endswith(_DROPOUTS) and key not in _ELSEWHERE and isinstance(value, float) and value > 0:
            yield f"{key}={value:g}"
