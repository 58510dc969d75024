"""Tensor and sequence parallel: every matrix is split over the ranks of one axis, and so are the tokens between them.

The model brings the table (`tensor_plan`: module -> how it is split); this file knows what the words in it mean.

    region      work that the ranks split: its input is whole on all of them, its output is the sum of their parts
    column      a linear layer whose outputs are split; inside a region
    row         a linear layer whose inputs are split; inside a region
    heads:N     a column of N heads that are not cut; where there are fewer than ranks, several ranks use the same one
    shared      inside a region, held whole by every rank, each of which sees a part of its gradient
    experts     stacked feed-forwards, each of them split as column and row
    vocabulary  an embedding whose rows are split; its output is a sum
    head        a column that ends the model: the logits stay split over the vocabulary
    tokens      between regions: held whole; with sequence parallel each rank works on its own tokens
    lookup      as tokens, for an embedding of positions
    dropout     as tokens, for a mask that follows from the tokens' keys

Where no regions are known, linear layers are split one by one, with as many more messages; tokens are then not split:

    outputs        a linear layer whose outputs are split
    outputs-whole  the same; they are gathered behind it
    inputs         a linear layer whose inputs are split; its output is summed
    inputs-own     the same; each rank takes its part of an input that is whole
    experts-summed stacked feed-forwards that are called with tokens and their choices, each of them split; their output
                   is summed

With sequence parallel a region begins with an all-gather of tokens and ends with a reduce-scatter; without, it begins
with nothing and ends with an all-reduce. The backward pass does the reverse. Rows and columns are cut as evenly as
they go; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.cuts import part
from meshwright.errors import ConfigError
from meshwright.models import expert_cuts
from meshwright.models.expert_cuts import Cut, cut_of
from meshwright.models.expert_plan import call_of
from meshwright.models.head import Targets, Vocabulary
from meshwright.models.hf_tensor_plan import hugging_face_plan
from meshwright.models.reads import Forward, Transform, around_forward, local_part, read_through, seen
from meshwright.models.tensor_plan import Rule, cut_dimension, rule_of
from meshwright.parallel.collectives import add_up, add_up_tokens, copy, gather_parts, gather_tokens, own_part
from meshwright.torch_private import parameters_of, shard_within


@dataclass
class Axis:
    """The ranks that split every matrix, seen from one of them."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool
    """Whether tokens are split where they can be."""
    reduce: torch.dtype
    """In which gradients are summed."""
    split: bool = False
    """Whether they are, in the forward pass in hand."""

    def begin(self, tokens: int, training: bool) -> None:
        """Decide for a sequence of that many tokens."""
        self.split = self.sequence and tokens % self.size == 0
        if self.sequence and training and not self.split:
            raise ValueError(
                f"a sequence of {tokens} tokens cannot be dealt out to tp={self.size} ranks; "
                f"train on multiples of {self.size} tokens, or with sp=off"
            )

    def enter(self, x_BTC: Tensor) -> Tensor:
        """What comes into a region: all tokens."""
        return gather_tokens(x_BTC, self.group) if self.split else copy(x_BTC, self.group)

    def leave(self, x_BTC: Tensor) -> Tensor:
        """What goes out of a region: the sum of the ranks' parts."""
        return add_up_tokens(x_BTC, self.group) if self.split else add_up(x_BTC, self.group)

    def own_tokens(self, x_BT: Tensor) -> Tensor:
        """This rank's part of something that is known of all tokens."""
        return x_BT.chunk(self.size, dim=1)[self.rank] if self.split else x_BT

    def own_part(self, length: int) -> slice:
        """This rank's part of a dimension of that length, cut as DTensors are."""
        return part(length, self.size, self.rank)

    def sum_gradient(self, parameter: Tensor) -> Tensor:
        """A parameter of which every rank sees a part of the gradient."""
        return copy(parameter, self.group, self.reduce)

    def sum_gradient_of_tokens(self, parameter: Tensor) -> Tensor:
        """A parameter that works on this rank's tokens, where tokens are split."""
        return copy(parameter, self.group, self.reduce) if self.split else parameter


def check(model: nn.Module, tp: int) -> None:
    """Raise a ConfigError unless the model's table covers all of its parameters and can be followed by that many."""
    plan = _plan(model, tp)
    kind = type(model).__name__
    if plan is None:
        raise ConfigError(
            f"tp needs a table that says how {kind} is split: give the class a `tensor_plan` "
            "(module name -> rule; docs/strategies.md has the rules), or use tp=1"
        )
    modules = dict(model.named_modules())
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(
                f"{kind}.tensor_plan has a row '{pattern}', and no module of that name; mend or remove it"
            )
    for name, module in modules.items():
        rule = rule_of(plan, name)
        if rule is not None and rule.word == "heads" and rule.number % tp and tp % rule.number:
            raise ConfigError(
                f"tp={tp} cannot deal out the {rule.number} heads of {name}; it must divide them or be a multiple"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise ConfigError(f"{name} has max_norm, which changes its weights while they are read; tp cannot split it")
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise ConfigError(f"{name} has scale_grad_by_freq, which tp does not know; switch it off, or use tp=1")
        if rule is not None and rule.word not in _RULES:
            raise ConfigError(f"{kind}.tensor_plan has no rule '{rule.word}' for {name}; rules are {', '.join(_RULES)}")
        if rule is not None and rule.word == "experts-summed":
            expert_cuts.check(name, module, tp)
            if call_of(name, module) != "choices":
                raise ConfigError(f"{name} takes rows, which 'experts-summed' is not for; use 'experts' in a 'region'")
        held = [parameter for parameter, value in parameters_of(module).items() if value is not None]
        if held and (rule is None or rule.word == "region"):
            raise ConfigError(
                f"no rule of {kind}.tensor_plan covers the parameter {f'{name}.{held[0]}'.lstrip('.')}; "
                f"give its module one of {', '.join(word for word in _RULES if word != 'region')}, or use tp=1"
            )


def apply(model: nn.Module, mesh: DeviceMesh, sequence: bool, reduce: torch.dtype) -> Axis:
    """Split a model in place over one axis, which is given; on the meta device too."""
    plan = _plan(model, mesh.size()) or {}
    sequence = sequence and "region" in plan.values()
    axis = Axis(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size(), sequence, reduce)
    splitter = _Splitter(axis)
    for name, module in model.named_modules():
        rule = rule_of(plan, name)
        if rule is not None:
            _RULES[rule.word](module, splitter, rule)
    return axis


def _plan(model: nn.Module, tp: int) -> Mapping[str, str] | None:
    """The model's own table, or the one that follows from what a Hugging Face model says of itself."""
    own: Mapping[str, str] | None = getattr(model, "tensor_plan", None)
    return own if own is not None else hugging_face_plan(model, tp)


class _Splitter:
    """Stores parameters split over the axis; one that modules share is split once."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def hold(
        self, module: nn.Module, rule: Rule, *reads: Transform, only: str | None = None, cut: Cut | None = None
    ) -> None:
        """Store the module's parameters as the rule says, or cut as given; its code sees this rank's parts, through
        `reads`."""
        for name, parameter in list(parameters_of(module).items()):
            if parameter is None or only not in (None, name):
                continue
            if parameter not in self._done:
                dimension = cut_dimension(rule, name, self.axis.size)
                self._done[parameter] = self._split(parameter, cut or (None if dimension is None else Cut(dimension)))
            parameters_of(module)[name] = self._done[parameter]
            read_through(module, name, local_part, *reads)

    def _split(self, parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
        part = parameter.detach()
        if cut is not None:
            part = torch.cat([self._own(pack, cut.dim) for pack in part.chunk(cut.packs, cut.dim)], cut.dim)
        placements = [Replicate() if cut is None else shard_within(cut.dim, cut.packs)]
        shape, stride = parameter.shape, parameter.stride()
        split = DTensor.from_local(part, self.axis.mesh, placements, run_check=False, shape=shape, stride=stride)
        return nn.Parameter(split, requires_grad=parameter.requires_grad)

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        own = self.axis.own_part(tensor.shape[dim])
        return tensor.narrow(dim, own.start, own.stop - own.start)


def _region(module: nn.Module, splitter: _Splitter, _: Rule) -> None:
    axis = splitter.axis

    def forward(inner: Forward, x_BTC: Tensor, *rest: object, **options: object) -> Tensor:
        return axis.leave(inner(axis.enter(x_BTC), *rest, **options))

    around_forward(module, forward)


def _cut(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    splitter.hold(module, rule)


def _row(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    splitter.hold(module, rule, only="weight")
    _hold_share(module, splitter, rule, "bias")


def _hold_share(module: nn.Module, splitter: _Splitter, rule: Rule, bias: str) -> None:
    """Where the ranks' outputs are added up, their shares of the bias are too."""
    axis = splitter.axis
    splitter.hold(module, rule, axis.sum_gradient, lambda whole: whole / axis.size, only=bias)


def _heads(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    axis, heads = splitter.axis, rule.number
    if heads % axis.size == 0:
        splitter.hold(module, rule)
        return
    mine = axis.rank * heads // axis.size
    splitter.hold(module, rule, axis.sum_gradient, lambda rows: rows.chunk(heads)[mine])


def _outputs(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    splitter.hold(module, rule)
    around_forward(module, lambda inner, x: inner(copy(x, splitter.axis.group)))


def _outputs_whole(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    group = splitter.axis.group
    splitter.hold(module, rule)
    around_forward(module, lambda inner, x: gather_parts(inner(copy(x, group)), group))


def _inputs(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    _row(module, splitter, rule)
    around_forward(module, lambda inner, x: add_up(inner(x), splitter.axis.group))


def _inputs_own(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    group = splitter.axis.group
    _row(module, splitter, rule)
    around_forward(module, lambda inner, x: add_up(inner(own_part(x, group)), group))


def _experts_summed(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    group = splitter.axis.group
    for name in list(parameters_of(module)):
        if (cut := cut_of(module, name)) is not None:
            splitter.hold(module, rule, only=name, cut=cut)
        else:
            _hold_share(module, splitter, rule, name)

    def forward(inner: Forward, x_NC: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        # Of the weights, too, every rank sees a part of the gradient.
        return add_up(inner(copy(x_NC, group), index_NK, copy(weights_NK, group)), group)

    around_forward(module, forward)


def _shared(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    splitter.hold(module, rule, splitter.axis.sum_gradient)


def _tokens(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    splitter.hold(module, rule, splitter.axis.sum_gradient_of_tokens)


def _lookup(module: nn.Module, splitter: _Splitter, rule: Rule) -> None:
    _tokens(module, splitter, rule)
    around_forward(module, lambda inner, positions_BT: inner(splitter.axis.own_tokens(positions_BT)))


def _dropout(module: nn.Module, splitter: _Splitter, _: Rule) -> None:
    def forward(inner: Forward, x_BTC: Tensor, keys_BT: Tensor | None) -> Tensor:
        return inner(x_BTC, keys_BT if keys_BT is None else splitter.axis.own_tokens(keys_BT))

    around_forward(module, forward)


def _vocabulary(module: nn.Embedding, splitter: _Splitter, rule: Rule) -> None:
    axis, rows = splitter.axis, splitter.axis.own_part(module.num_embeddings)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - rows.start if rows.start <= padding < rows.stop else None
    splitter.hold(module, rule)

    def forward(_: Forward, tokens_BT: Tensor) -> Tensor:
        axis.begin(tokens_BT.shape[1], module.training)
        weight = seen(module, "weight")
        assert weight is not None
        if rows.start == rows.stop:
            # More ranks than rows to go round: no token is found here, but the ranks go forward and back together.
            nothing = weight.new_zeros(*tokens_BT.shape, module.embedding_dim)
            return axis.leave(nothing + weight.sum())
        absent_BT1 = ((tokens_BT < rows.start) | (tokens_BT >= rows.stop))[..., None]
        found_BTC = F.embedding(
            (tokens_BT - rows.start).clamp(0, rows.stop - rows.start - 1), weight, padding_idx=padding
        )
        return axis.leave(found_BTC.masked_fill(absent_BT1, 0.0))

    around_forward(module, forward)


def _head(module: nn.Linear, splitter: _Splitter, rule: Rule) -> None:
    axis, vocabulary = splitter.axis, module.out_features
    splitter.hold(module, rule)

    part = Vocabulary(axis.own_part(vocabulary).start, axis.group)

    def forward(inner: Forward, x_BTC: Tensor, targets: Targets | None = None) -> Tensor:
        if targets is not None:
            return inner(axis.enter(x_BTC), targets, part)
        logits = inner(axis.enter(x_BTC))
        shape = torch.Size((*logits.shape[:2], vocabulary))
        stride = (logits.shape[1] * vocabulary, vocabulary, 1)
        return DTensor.from_local(logits, axis.mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)

    around_forward(module, forward)


_RULES: dict[str, Callable[[Any, _Splitter, Rule], None]] = {
    "region": _region,
    "column": _cut,
    "row": _row,
    "heads": _heads,
    "outputs": _outputs,
    "outputs-whole": _outputs_whole,
    "inputs": _inputs,
    "inputs-own": _inputs_own,
    "shared": _shared,
    "experts": _cut,
    "experts-summed": _experts_summed,
    "vocabulary": _vocabulary,
    "head": _head,
    "tokens": _tokens,
    "lookup": _lookup,
    "dropout": _dropout,
}
