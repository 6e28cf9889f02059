"""Private training with the ``Trainer`` of Transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dpbench.core.errors import ConfigurationError
from dpbench.private import Losses, Private, PrivateOptimizer, make_private
from dpbench.training.poisson import as_plain
from dpbench.workloads.base import examples_in

IGNORED = -100
"""The label of tokens without a loss."""


@dataclass(frozen=True)
class Privacy:
    """What `PrivateTrainer` promises, in the words of `dpbench.private.make_private`.

    Give ``noise_multiplier``, or ``target_epsilon`` for the epochs of the training's arguments.
    ``delta`` is the δ of the target. Logs have the ε for this δ.
    """

    max_grad_norm: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    accountant: str = "prv"
    seed: int | None = None

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigurationError("give Privacy either noise_multiplier or target_epsilon")


Trainer: Any = transformers.Trainer


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` whose training is private.

    It has the same arguments. Batches are Poisson batches of per_device_train_batch_size ×
    gradient_accumulation_steps examples on average, of which per_device_train_batch_size are
    trained at once. Its checkpoints contain the accountant. Logs contain ε. The loss in logs has no
    noise, and to publish it is not private. A ``target_epsilon`` is that of one call of ``train``:
    a further call takes more steps, and ε rises.

    The ``max_grad_norm`` of the training's arguments is set to 0. It would clip the noisy mean, and
    `Privacy.max_grad_norm` clips each example.

    Args:
        privacy: what is promised.
        losses: returns the losses of a batch's examples, ``[B]``, from the model and the batch, a
            dictionary. The default is `example_losses`.

    Raises:
        ConfigurationError: an argument cannot be kept in private training.
    """

    def __init__(
        self, *arguments: Any, privacy: Privacy, losses: Losses | None = None, **options: Any
    ) -> None:
        self.privacy = privacy
        self._private: Private | None = None
        self._losses = losses or example_losses
        bound = inspect.signature(Trainer.__init__).bind(self, *arguments, **options)
        args = copy.copy(bound.arguments.get("args") or transformers.TrainingArguments())
        check_arguments(args)
        given = bound.arguments.get("compute_loss_func")
        if given or type(self).compute_loss is not Trainer.compute_loss:
            raise ConfigurationError(
                "compute_loss is one loss for a batch, but each example needs its own: pass losses="
            )
        self._physical = args.per_device_train_batch_size
        self._logical = self._physical * args.gradient_accumulation_steps
        args.gradient_accumulation_steps, args.max_grad_norm = 1, 0.0
        args.ignore_data_skip = True  # a Poisson batch is drawn anew, never repeated
        bound.arguments["args"] = args
        self._last_loss = torch.zeros(())
        super().__init__(*bound.args[1:], **bound.kwargs)

    def create_optimizer(self, *model: nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer, and prepare private training when a model is trained first."""
        if self._private is None or self._private.model is not self.model:
            optimizer = super().create_optimizer(*model)
            promised = asdict(self.privacy)
            delta = promised.pop("delta")
            if self.privacy.target_epsilon is not None:
                epochs, steps = self.args.num_train_epochs, len(self.train_dataset) // self._logical
                if self.args.max_steps > 0:
                    epochs = self.args.max_steps / max(steps, 1)
                promised |= {"target_delta": delta, "epochs": epochs}
            self._private = make_private(
                self.model,
                optimizer,
                self.train_dataset,
                batch_size=self._logical,
                physical_batch_size=self._physical,
                collate_fn=self._get_collator_with_removed_columns(self.data_collator, "training"),
                num_workers=self.args.dataloader_num_workers,
                pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
                **promised,
            )
            self.optimizer = StepTaken(self._private)
        return self.optimizer

    @property
    def private(self) -> Private:
        """The private training, from the first call of ``train`` on."""
        self.create_optimizer()
        assert self._private is not None
        return self._private

    def get_train_dataloader(self) -> Any:
        """Return the loader of Poisson batches."""
        return self.private.loader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Take a whole private step, and return the mean loss before it.

        For an empty batch, it is the loss of the batch before, so that logs have no NaN.
        """
        model.train()
        inputs = as_plain(inputs)
        loss = self.private.step(inputs, self._contextual)
        if examples_in(inputs):
            self._last_loss = loss
        return self._last_loss.to(self.args.device)

    def _contextual(self, model: Callable[..., Any], batch: Any) -> Tensor:
        with self.compute_loss_context_manager():
            return self._losses(model, batch)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint and not self.private.steps:
            raise ConfigurationError(
                f"{checkpoint} has no optimizer's state, so the ε of its steps is unknown: save "
                f"without save_only_model"
            )

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add ε to the logs, and leave out the norm of gradients, which there are none of."""
        logs.pop("grad_norm", None)
        if self._private and self._private.steps:
            logs["epsilon"] = self._private.epsilon(self.privacy.delta)
        super().log(logs, *arguments, **options)


class StepTaken(PrivateOptimizer):
    """The optimizer of the loop of Transformers, which steps after `PrivateTrainer` has done so."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def example_losses(model: Callable[..., Any], batch: dict[str, Any]) -> Tensor:
    """Return each example's mean loss over its own labels, as models of Transformers have it.

    Args:
        model: a model for causal or masked language modelling, or for classification.
        batch: its inputs, with ``labels``.
    """
    if "labels" not in batch:
        raise ConfigurationError("the batch has no labels: pass losses=… to PrivateTrainer")
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits, batch["labels"]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.dim() == 2 and logits.shape[1] == 1:
        return F.mse_loss(logits[:, 0], labels.to(logits.dtype), reduction="none")
    if logits.dim() == 2 and labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if logits.dim() != 3 or labels.dim() != 2:
        raise ConfigurationError("the losses of this model are not known: pass losses=…")
    whole: Any = getattr(model, "get_base_model", lambda: model)()
    if type(whole).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    counted = (labels != IGNORED).sum(1).clamp(min=1)
    return each.view(labels.shape).sum(1).div(counted)


REFUSED = {
    "group_by_length": "batches of examples of equal length are no Poisson batches",
    "packing": "packing puts several examples into one",
    "fp16": "it scales gradients before they are clipped (use bf16)",
    "label_smoothing_factor": "it is not in the losses of examples (pass losses=…)",
    "torch_compile": "compiled code has no layers that can be clipped",
    "auto_find_batch_size": "a step must not be taken again (set per_device_train_batch_size)",
    "optim_target_modules": "its optimizer needs gradients that are not clipped",
}
"""Training arguments that private training cannot keep, and why."""


def check_arguments(args: Any) -> None:
    """Raise if training arguments ask for what private training cannot do."""
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigurationError(f"leave out {name}: {why}")
    if (strategy := getattr(args, "train_sampling_strategy", "random")) != "random":
        raise ConfigurationError(
            f"leave out train_sampling_strategy={strategy}: its batches are no Poisson batches"
        )
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        raise ConfigurationError(
            "PrivateTrainer trains on one GPU: set CUDA_VISIBLE_DEVICES to one, or use "
            "dpbench.make_private under torchrun, which supports several"
        )
