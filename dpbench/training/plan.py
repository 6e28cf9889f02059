"""Decides before the first step how the parameters of a model are clipped.

The model computes the losses of a few examples in batches of different sizes. This shows which
dimensions of each layer's inputs and outputs are examples, and whether the examples mix.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from dpbench.core.errors import ConfigurationError
from dpbench.training.base import Batch
from dpbench.training.per_layer import Rule, rule_of
from dpbench.training.refusals import LAYER_ERRORS, check_used_in_layers, used_outside
from dpbench.training.units import UnitRule, random_states
from dpbench.workloads.base import examples_in

FEW, FEWER = 3, 2
"""Numbers of examples in the batches whose shapes are compared."""

TOLERANCES = {2: 0.05, 4: 2e-3, 8: 1e-6}
"""Relative differences of an example's loss between batches of equal size that count as rounding,
by bytes per number of the parameters. With autocast, the value for 2 bytes is used."""

OTHER_SIZE = 0.1
"""The same for batches of different sizes, for which a GPU may sum in another order. If a loss is
divided by the size of the batch, it differs by more."""

SAMPLED = 2**16
"""About how many elements of an example's rows are compared between batches."""

CANNOT_PROBE = (*LAYER_ERRORS, AssertionError)
"""Classes of errors with which a model may refuse a batch of another size."""


class CallShapes(NamedTuple):
    """How a module is called: rows for each example in each tensor, and whether rows are examples.

    Attributes:
        inputs: for each tensor among the arguments, how many rows of its first dimension belong to
            each example; 0 if examples share it; -1 if examples are in another dimension.
        outputs: the same for the returned tensors.
        plain: whether the module has one argument, a tensor by position, and returns a tensor.
        first: the shape of the first tensor among the arguments.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    plain: bool
    first: tuple[int, ...] = ()

    @property
    def by_example(self) -> bool:
        """True if the call could be made for each example alone."""
        has_rows = any(rows > 0 for rows in self.inputs)
        return has_rows and min(self.inputs) >= 0 and min(self.outputs, default=0) > 0

    @property
    def is_shared(self) -> bool:
        """True for a plain call with an input that all examples share."""
        return self.plain and self.inputs == (0,)

    @property
    def has_tokens(self) -> bool:
        """True for a plain call whose input and output have equally many rows for each example."""
        return self.plain and self.by_example and self.inputs == self.outputs


def rows_by_example(larger: Sequence[torch.Size], smaller: Sequence[torch.Size]) -> tuple[int, ...]:
    """Return the rows for each example, from shapes with `FEW` and with `FEWER` examples."""
    rows = []
    for a, b in zip(larger, smaller, strict=True):
        if a == b:
            rows.append(0)
        else:
            per = a[0] // FEW
            right = a[0] == per * FEW and b[0] == per * FEWER and a[1:] == b[1:]
            rows.append(per if right else -1)
    return tuple(rows)


class Probe:
    """Runs a model with few examples.

    Args:
        model: the model.
        losses: computes the losses ``[B]`` of a batch.
        batch: a batch, whose first examples are used. If there are too few, they are repeated.
        tolerance: the relative difference of losses that counts as rounding.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Batch], Tensor],
        batch: Batch,
        tolerance: float,
    ) -> None:
        self.tolerance = tolerance
        self.model, self._losses = model, losses
        self.examples = 0
        """Number of examples in the batch that runs now."""
        number = examples_in(batch)
        self._parts = [
            pytree.tree_map(lambda t, c=chosen: t[[n % number for n in c]], batch)
            for chosen in ((0, 1, 2), (0, 1), (2,), (2, 1), (0, 0, 2), (0, 1, 1))
        ]

    def losses(self, part: int) -> Tensor:
        """Return the losses of a part, see the examples in the constructor."""
        self.examples = examples_in(self._parts[part])
        return self._losses(self._parts[part])

    def calls(self) -> dict[nn.Module, list[CallShapes]]:
        """Return how each module is called. A module whose calls differ has no calls here."""
        seen = [self._shapes(part) for part in (0, 1)]
        found: dict[nn.Module, list[CallShapes]] = {}
        for layer, calls in seen[0].items():
            others = seen[1].get(layer, [])
            same = len(calls) == len(others) and all(
                (len(a[0]), len(a[1])) == (len(b[0]), len(b[1]))
                for a, b in zip(calls, others, strict=False)
            )
            if same:
                found[layer] = [
                    CallShapes(
                        rows_by_example(a[0], b[0]),
                        rows_by_example(a[1], b[1]),
                        a[2],
                        tuple(a[0][0]) if a[0] else (),
                    )
                    for a, b in zip(calls, others, strict=True)
                ]
        return found

    def _shapes(self, part: int) -> dict[nn.Module, list[Any]]:
        seen: dict[nn.Module, list[Any]] = {}

        def note(layer: nn.Module, given: Any, options: Any, returned: Any) -> None:
            plain = len(given) == 1 and not options and isinstance(given[0], Tensor)
            seen.setdefault(layer, []).append(
                (
                    shapes_of((given, options)),
                    shapes_of(returned, outputs=True),
                    plain and isinstance(returned, Tensor),
                )
            )

        hooks = [m.register_forward_hook(note, with_kwargs=True) for m in self.model.modules()]
        try:
            self.losses(part)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def buffers_after(self, part: int) -> dict[str, Tensor]:
        """Return the buffers that a forward of a part changes, as they are then."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.losses(part)
        changed: dict[str, Tensor] = {}
        for name, buffer in self.model.named_buffers():
            if name in before and not torch.equal(buffer, before[name]):
                changed[name] = buffer.clone()
                buffer.copy_(before[name])
        return changed

    def check_buffers(self) -> None:
        """Raise if a forward keeps something of the examples in a buffer."""
        if not (some := self.buffers_after(1)):
            return
        others = self.buffers_after(3)
        for name, buffer in some.items():
            if name not in others or not torch.equal(buffer, others[name]):
                raise ConfigurationError(
                    f"buffer {name} changes with the examples in forward, and no noise is added to "
                    f"it: put its layer into eval(), or replace it"
                )

    def check_order(self, layers: Mapping[nn.Module, str]) -> None:
        """Raise if a layer's rows are not those of one example after another.

        One example of a batch is replaced. Then only this example's rows may change.

        Args:
            layers: layers whose gradients are clipped, with their names.
        """
        before = self._rows(0, layers)
        for part, replaced in ((4, 1), (5, 2)):
            for layer, tensors in self._rows(part, layers).items():
                for old, new in zip(before.get(layer, []), tensors, strict=False):
                    if old.shape != new.shape or not old.numel():
                        continue
                    off = (old[0] - new[0]).abs() > self.tolerance * (1e-6 + old[1] + new[1])
                    off[replaced] = False
                    if off.any():
                        raise ConfigurationError(
                            f"layer {layers[layer] or 'of the whole model'} has rows of several "
                            f"examples in another order than the batch, as torch.cat([x, y]) puts "
                            f"them: use torch.stack([x, y], 1).flatten(0, 1), or call the model "
                            f"for x and for y"
                        )

    def _rows(self, part: int, layers: Mapping[nn.Module, str]) -> dict[nn.Module, list[Tensor]]:
        """Return `rows_summed` of the inputs and outputs of layers, in the order of calls."""
        seen: dict[nn.Module, list[Tensor]] = {}

        def note(layer: nn.Module, *calls: Any) -> None:
            tensors = [each for each in pytree.tree_leaves(calls) if isinstance(each, Tensor)]
            seen.setdefault(layer, []).extend(rows_summed(tensors))

        hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        try:
            self._seeded_losses(part)
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def alike(self, some: Tensor, others: Tensor, tolerance: float | None = None) -> Tensor:
        """Return for each example whether two losses differ by rounding only."""
        most = tolerance or self.tolerance
        return torch.isclose(some, others, most, most, equal_nan=True)

    def _seeded_losses(self, part: int) -> tuple[Tensor, bool]:
        """Return the losses of a part, with equal random numbers, and whether any were drawn."""
        torch.manual_seed(0)
        before = random_states(self.model)
        losses = self.losses(part).double()
        return losses, not all(map(torch.equal, before, random_states(self.model)))

    def check_unmixed(self) -> None:
        """Raise if an example's loss depends on the other examples of its batch.

        Examples are exchanged for others in a batch of one size, and compared with batches of other
        sizes, unless the model draws random numbers outside dropout modules.
        """
        whole, is_random = self._seeded_losses(0)
        parts, _ = self._seeded_losses(4)
        right = self.alike(whole, parts)
        right[1] = True  # another example is there
        if right.all() and not is_random:
            parts = torch.cat([self.losses(1), self.losses(2)]).double()
            right = self.alike(whole, parts, max(OTHER_SIZE, self.tolerance))
        if not right.all():
            which = int(right.logical_not().nonzero()[0])
            raise ConfigurationError(
                f"the loss of an example is {float(parts[which]):.4g} in one batch and "
                f"{float(whole[which]):.4g} with other examples, so the model or its loss mixes "
                f"examples, and nobody can clip them: use layers that treat each example alone, "
                f"and divide an example's loss only by numbers of this example"
            )


class OutputSums:
    """Computes for each example a weighted sum of what the model returns, in place of a loss.

    In the usual loop, only the loss's value is known after the forward. So examples that the model
    mixes are noticed, and examples that the loss mixes are noticed only if the model computes it.
    """

    def __init__(
        self, leaves: list[Any], where: list[int], structure: Any, *, scales: bool
    ) -> None:
        self._leaves, self._where, self._structure = leaves, where, structure
        self._scales = scales

    def __call__(self, model: Callable[..., Any], batch: Any) -> Tensor:
        found, _ = self._returned(model, batch)
        if not found:
            raise ConfigurationError(
                "the model returns no tensor whose first dimension is the example: use private.step"
            )
        flat = torch.cat([each.flatten(1).float() for each in found], 1)
        # The elements of a normalized output have a constant mean, so a plain mean tells nothing.
        sums: Tensor = flat @ torch.arange(flat.shape[1], device=flat.device).cos()
        return sums.div(flat.shape[1] ** 0.5)

    def _returned(self, model: Callable[..., Any], batch: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the model's outputs of examples, and its outputs that are one number."""
        leaves = [*self._leaves]
        for n, each in zip(self._where, batch, strict=True):
            leaves[n] = each
        given, options = pytree.tree_unflatten(leaves, self._structure)
        tensors = [
            each
            for each in pytree.tree_leaves(model(*given, **options))
            if isinstance(each, Tensor) and each.is_floating_point()
        ]
        found = [each for each in tensors if each.shape[:1] == (len(batch[0]),)]
        return found, [each for each in tensors if each.dim() == 0]

    def check_loss(self, model: nn.Module, batch: Sequence[Tensor]) -> None:
        """Raise if a loss that the model returns is not the mean or sum of its examples' losses."""
        batch = [each[:FEW] for each in batch]
        with unnoticed(model), without_dropout(model), torch.enable_grad():
            whole = self._gradients(model, batch)
            for n in range(len(batch[0])):
                alone = self._gradients(model, [each[n : n + 1] for each in batch])
                for one, every in zip(alone, whole, strict=True):
                    wanted = one[0] / (len(batch[0]) if self._scales else 1)
                    if (every[n] - wanted).norm() > OTHER_SIZE * wanted.norm():
                        raise ConfigurationError(
                            "the loss that the model returns is not the mean (or the sum, see "
                            "loss_reduction) of its examples' losses, maybe because it is divided "
                            "by the tokens of the batch: use private.step with a loss per example"
                        )

    def _gradients(self, model: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of a returned loss with respect to returned outputs of examples."""
        found, losses = self._returned(model, batch)
        found = [each for each in found if each.requires_grad]
        if not (found and losses):
            return []
        made = torch.autograd.grad(torch.stack(losses).sum(), found, allow_unused=True)
        return [each for each in made if each is not None]


def rows_summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return for each tensor two numbers for each third of its rows: a weighted sum, and the norm.

    Of large tensors, some elements at equal distances are used. A tensor whose rows cannot be
    divided by `FEW` has no numbers.
    """
    sums = []
    for tensor in tensors:
        if tensor.dim() and tensor.numel() and len(tensor) % FEW == 0:
            flat = tensor.detach().reshape(FEW, -1)
            flat = flat[:, :: flat.shape[1] // SAMPLED + 1].double()
            weights = torch.arange(flat.shape[1], device=flat.device).cos().double()
            sums.append(torch.stack([flat @ weights, flat.norm(dim=1)]))
        else:
            sums.append(torch.empty(2, 0, device=tensor.device))
    return sums


def shapes_of(tree: Any, *, outputs: bool = False) -> list[torch.Size]:
    """Return the shapes of the tensors in a tree; of outputs, only of floating-point tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf.shape for leaf in leaves if not outputs or leaf.is_floating_point()]


@contextmanager
def unnoticed(model: nn.Module) -> Iterator[None]:
    """Run the model without a trace: buffers and random numbers stay as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with ExitStack() as held:
        held.enter_context(torch.random.fork_rng([*devices]))
        held.enter_context(torch.no_grad())
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch off all modules whose class is named after dropout."""
    drops = [m for m in model.modules() if "drop" in type(m).__name__.lower() and m.training]
    for each in drops:
        each.eval()
    try:
        yield
    finally:
        for each in drops:
            each.train()


class Plan:
    """The rule of each layer, and the layers whose inputs are expanded.

    The rule of a parameter is the usual rule of its layer, if the layer is called with one tensor
    that has examples in its first dimension. If all examples share a layer's input, the input is
    expanded. Otherwise, a `UnitRule` clips the parameter. Its unit is the smallest module around
    the layer that could be called for each example alone, and outside which the parameter is not
    used.

    Args:
        model: the model.
        kernels: see `dpbench.training.per_layer.rule_of`.
        one_example: see `UnitRule`.
        any_size: whether the model must run with any number of examples.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kernels: bool,
        one_example: Callable[[], AbstractContextManager[object]],
        any_size: bool = False,
    ) -> None:
        self.model = model
        self.rules: dict[nn.Module, Rule[Any]] = {}
        self.expanded: set[nn.Module] = set()
        self._one_example, self._any_size = one_example, any_size
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._refused: dict[nn.Module, ConfigurationError] = {}
        self.knows_uses = False
        """Whether all parameters are known to be used only in the calls of their layers."""
        for name, layer in self._modules.items():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                try:
                    self.rules[layer] = rule_of(layer, name, kernels=kernels)
                except ConfigurationError as error:
                    self._refused[layer] = error

    def fit(self, probe: Probe, *, fake: bool) -> None:
        """Adapt the plan to how the model calls its layers.

        Args:
            probe: runs the model.
            fake: whether tensors have no data, so that losses cannot be compared.
        """
        try:
            self._fit(probe, fake=fake)
        except CANNOT_PROBE as error:
            self._unprobed(error, fake=fake)
            for refusal in self._refused.values():
                raise refusal from error

    def check_losses(self, probe: Probe, layers: Collection[nn.Module]) -> None:
        """Raise if a loss mixes examples, or brings the rows of layers into another order."""
        try:
            with unnoticed(self.model), without_dropout(self.model):
                probe.check_unmixed()
                probe.check_order({layer: self._names[layer] for layer in layers})
        except CANNOT_PROBE as error:
            self._unprobed(error, fake=False)

    def _unprobed(self, error: Exception, *, fake: bool) -> None:
        """Raise a refusal again. Warn of other errors of a model that runs with few examples."""
        if isinstance(error, ConfigurationError):
            raise error
        if self._any_size:
            raise ConfigurationError(
                f"the model does not run with {FEW} examples of a batch ({error}); Poisson batches "
                f"may have any size, so the first dimension of each tensor must be the example"
            ) from error
        if not fake:
            warnings.warn(
                f"the model does not run with {FEW} examples ({error}), so whether it mixes "
                f"examples is not known",
                stacklevel=6,
            )

    def _fit(self, probe: Probe, *, fake: bool) -> None:
        with unnoticed(self.model), without_dropout(self.model):
            if not fake:
                probe.check_buffers()
                probe.check_unmixed()
            self._calls = probe.calls()
            units: dict[nn.Module, dict[str, nn.Parameter]] = {}
            for layer in [*self.rules]:
                calls = self._calls.get(layer, [])
                if not self._fits(self.rules[layer], calls) and not self._expands(probe, layer):
                    self._refused[layer] = self.rules.pop(layer).refusal(
                        "the first dimension of an input or output is not the example, or it has "
                        "other arguments than one tensor"
                    )
            if isinstance(self.model, FSDPModule):
                self._check_sharded()
            for layer, error in self._refused.items():
                self._add_to_unit(units, layer, self._names[layer], error)
            self._make_units(units)
            if not isinstance(self.model, FSDPModule):
                while outside := self._used_outside(probe):
                    self._widen(units, outside)
                self.knows_uses = True
            if not fake:
                probe.check_order({layer: self._names[layer] for layer in self.rules})
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward without a backward leaves the root module gathered

    def _check_sharded(self) -> None:
        """Raise if FSDP2 shards a layer that needs more than the usual rule of one layer."""
        for error in self._refused.values():
            raise error
        owners = Counter(p for rule in self.rules.values() for p in rule.trained.values())
        for shared in (parameter for parameter, times in owners.items() if times > 1):
            every = self.model.named_parameters(remove_duplicate=False)
            names = " and ".join(name for name, p in every if p is shared)
            raise ConfigurationError(
                f"{names} are one parameter of several layers, which this trainer does not train "
                f"under parallel=fsdp2: untie or freeze them, or use parallel=ddp"
            )

    def _fits(self, rule: Rule[Any], calls: Sequence[CallShapes]) -> bool:
        rows = {each.inputs for each in calls}
        if not calls:
            return True  # it is not called, or only under the name of another layer
        if len(rows) > 1 or not all(each.has_tokens for each in calls):
            return False
        rule.rows = calls[0].inputs[0]
        return rule.rows == 1 or rule.takes_rows

    def _expands(self, probe: Probe, layer: nn.Module) -> bool:
        """Expand the layer's input if the losses stay the same."""
        calls = self._calls.get(layer, [])
        if not calls or not all(each.is_shared for each in calls):
            return False
        if not all(each.first[:1] == (1,) or len(each.first) == 1 for each in calls):
            return False
        before = probe.losses(0)
        hook = layer.register_forward_pre_hook(partial(expand, lambda: probe.examples))
        try:
            same = bool(probe.alike(probe.losses(0), before).all())
        except CANNOT_PROBE:
            same = False
        finally:
            hook.remove()
        if same:
            self.expanded.add(layer)
        return same

    def _add_to_unit(
        self,
        units: dict[nn.Module, dict[str, nn.Parameter]],
        layer: nn.Module,
        start: str,
        error: ConfigurationError,
    ) -> None:
        """Give a layer's trained parameters to the smallest unit at or above a module."""
        path = start
        while not self._is_unit(self._modules[path]):
            if not path:
                raise error
            path = path.rpartition(".")[0]
        unit, prefix = self._modules[path], f"{path}." if path else ""
        own = f"{self._names[layer]}." if self._names[layer] else ""
        usual = {id(p) for rule in self.rules.values() for p in rule.trained.values()}
        for name, parameter in layer.named_parameters(recurse=False):
            # A parameter that is also another layer's has that layer's rule.
            if parameter.requires_grad and id(parameter) not in usual:
                units.setdefault(unit, {})[f"{own}{name}".removeprefix(prefix)] = parameter

    def _is_unit(self, module: nn.Module) -> bool:
        calls = self._calls.get(module, [])
        return len({each.inputs for each in calls}) == 1 and all(c.by_example for c in calls)

    def _make_units(self, units: Mapping[nn.Module, dict[str, nn.Parameter]]) -> None:
        for unit, parameters in units.items():
            rows = self._calls[unit][0].inputs
            name = self._names[unit]
            self.rules[unit] = UnitRule(unit, name, parameters, rows, self._one_example)

    def _used_outside(self, probe: Probe) -> list[str]:
        own = {layer: [*rule.trained] for layer, rule in self.rules.items()}
        trained = [p for p in self.model.parameters() if p.requires_grad]
        try:
            with torch.enable_grad():
                return used_outside(self.model, own, lambda: probe.losses(2).sum())
        finally:
            for parameter in trained:
                parameter.requires_grad_()

    def _widen(
        self, units: dict[nn.Module, dict[str, nn.Parameter]], outside: Collection[str]
    ) -> None:
        """Move parameters that are used outside their layers or units to larger units."""
        for name in outside:
            try:
                check_used_in_layers([name])
            except ConfigurationError as error:
                refusal = error
            parameter = self.model.get_parameter(name)
            holders = [
                layer
                for layer, rule in self.rules.items()
                if any(p is parameter for p in rule.trained.values())
            ]
            if not holders:
                continue  # it has moved with another parameter of its layer
            path = min((self._names[each] for each in holders), key=len)
            if not path:
                raise refusal
            for layer in holders:
                del self.rules[layer]
                units.pop(layer, None)
                # Parameters that had a rule together keep one.
                own = self._modules[name.rpartition(".")[0]]
                for each in dict.fromkeys([own, layer]) if layer not in units else [own]:
                    self._add_to_unit(units, each, path.rpartition(".")[0], refusal)
        self._make_units(units)


def expand(examples: Callable[[], int], layer: nn.Module, given: Any) -> Any:
    """Give a layer one input for each example, instead of an input that the examples share."""
    [shared] = given
    number = examples()
    if not number:
        return given
    if shared.dim() == 1:
        return (shared.expand(number, -1),)
    return (shared.expand(number, *shared.shape[1:]),)
