"""`PrivateTrainer` trains as a loop over examples, and the models of Transformers stay usable."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import make_private
from dpbench.core.errors import ConfigurationError

transformers = pytest.importorskip("transformers")

from dpbench.integrations import huggingface  # noqa: E402  # needs Transformers
from dpbench.integrations.huggingface import Privacy, PrivateTrainer, example_losses  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:to clip", "ignore:GDP accounting")
TOKENS, ROWS, EXAMPLES, C = 6, 30, 24, 0.5
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = {"intermediate_size": 16, "vocab_size": ROWS, "pad_token_id": 0}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, **WIDE, **options)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": ROWS, "n_positions": 16}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **dropouts, pad_token_id=0, eos_token_id=1)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    torch.manual_seed(0)
    none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**SMALL, **WIDE, **none, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def lora() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def texts(number: int = EXAMPLES, **more: Any) -> list[dict[str, Any]]:
    """Texts of different lengths, whose padding has no label."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for n in range(number):
        tokens = torch.randint(2, ROWS, (TOKENS,), generator=generator)
        length = 3 + n % (TOKENS - 2)
        mask = (torch.arange(TOKENS) < length).long()
        labels = torch.where(mask > 0, tokens, -100)
        each = {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}
        made.append({**each, **more})
    return made


def classes(number: int = EXAMPLES) -> list[dict[str, Any]]:
    return [{**each, "labels": n % 3} for n, each in enumerate(texts(number))]


def trainer_of(model: Any, folder: Path, data: Any = None, **options: Any) -> PrivateTrainer:
    privacy = {"max_grad_norm": C, "delta": 1e-5, "noise_multiplier": 0.0, "seed": 2}
    privacy |= options.pop("privacy", {})
    passed = {n: options.pop(n) for n in ("losses", "eval_dataset", "callbacks") if n in options}
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "weight_decay": 0.0,
        "report_to": [],
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(**{**usual, **options})
    dataset = texts() if data is None else data
    return PrivateTrainer(model, args, train_dataset=dataset, privacy=Privacy(**privacy), **passed)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def one_after_another(model: nn.Module, batches: list[Any], rate: float = 0.1) -> None:
    """SGD with the mean over the expected batch of gradients that are clipped, without noise."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for batch in batches:
        sums = [torch.zeros_like(p) for p in trained]
        for n in range(len(batch["labels"])):
            loss = model(**{k: each[n : n + 1] for k, each in batch.items()}).loss
            gradients = torch.autograd.grad(loss, trained)
            norm = torch.stack([each.norm() for each in gradients]).norm()
            for total, each in zip(sums, gradients, strict=True):
                total += each * (C / norm).clamp(max=1)
        with torch.no_grad():
            for parameter, total in zip(trained, sums, strict=True):
                parameter -= rate * total / 4


def batches_of(trainer: PrivateTrainer) -> list[Any]:
    """What the trainer will train."""
    sampler = trainer.private._sampler
    batches = [{**batch} for batch in trainer.private.loader]
    sampler.drawn, sampler.unused = 0, []
    return batches


@pytest.mark.parametrize(
    ("model", "data"),
    [(llama, texts), (gpt2, texts), (bert, classes), (lora, texts)],
    ids=["llama", "gpt2", "bert", "lora"],
)
def test_the_trainer_trains_as_a_loop_over_examples(model: Any, data: Any, tmp_path: Path) -> None:
    trainer = trainer_of(model(), tmp_path, data())
    batches = batches_of(trainer)
    sizes = [len(batch["labels"]) for batch in batches]
    assert max(sizes) > 2  # physical batches of 2
    trainer.train()
    expected = model().train()
    one_after_another(expected, batches)
    torch.testing.assert_close(values(trainer.model), values(expected), atol=1e-5, rtol=1e-3)
    assert trainer.private.steps == trainer.state.global_step == len(batches) == EXAMPLES // 4
    assert trainer.private.noise_multiplier == 0


def test_logs_and_the_progress_bar_show_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = {"noise_multiplier": 1.0, "accountant": "rdp"}
    trainer = trainer_of(
        bert(), tmp_path, classes(), privacy=private, disable_tqdm=False, eval_strategy="steps",
        eval_steps=3, eval_dataset=classes(7),
    )  # fmt: skip
    trainer.train()
    logs = [each for each in trainer.state.log_history if "loss" in each]
    shown = [each["epsilon"] for each in logs]
    assert len(shown) == 3
    assert shown == sorted(shown)
    assert shown[-1] == trainer.private.epsilon(1e-5) > 0
    assert "'epsilon': '" in capsys.readouterr().out
    assert sum("eval_loss" in each for each in trainer.state.log_history) == 2


@pytest.mark.parametrize("filters", [True, False])
def test_empty_batches_leave_logs_finite(filters: bool, tmp_path: Path) -> None:
    trainer = trainer_of(
        bert(), tmp_path, classes(), per_device_train_batch_size=1, logging_steps=1,
        gradient_accumulation_steps=1, logging_nan_inf_filter=filters,
    )  # fmt: skip
    sizes = [len(batch["labels"]) for batch in batches_of(trainer)]
    assert 0 in sizes
    assert trainer.train().training_loss > 0
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(losses) == EXAMPLES
    assert all(map(math.isfinite, losses))


def test_columns_that_the_model_does_not_know_are_left_out(tmp_path: Path) -> None:
    data = texts(text="some words", number_of=3)
    trainer = trainer_of(lora(), tmp_path, data)
    assert {*next(iter(trainer.private.loader))} == {"input_ids", "attention_mask", "labels"}
    trainer.train()
    kept = trainer_of(lora(), tmp_path, data, remove_unused_columns=False)
    kept.data_collator = lambda items: {n: [each[n] for each in items] for n in items[0]}
    with pytest.raises(ConfigurationError, match="but not str: leave it out"):
        kept.train()


def test_a_run_goes_on_from_a_checkpoint_with_its_epsilon(tmp_path: Path) -> None:
    options: Any = {
        "privacy": {"noise_multiplier": 0.7, "accountant": "gdp"},
        "logging_steps": 99,
        "optim": "adamw_torch",
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "linear",
    }
    whole = trainer_of(lora(), tmp_path / "whole", **options)
    whole.train()
    resumed = trainer_of(lora(), tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert resumed.private.steps == whole.private.steps == 12
    assert resumed.private.epsilon(1e-5) == whole.private.epsilon(1e-5)
    torch.testing.assert_close(values(resumed.model), values(whole.model), atol=1e-5, rtol=1e-4)
    saved = torch.load(tmp_path / "whole" / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert {*saved["private"]} == {"steps", "accountant"}
    for name in ("optimizer.pt",):
        (tmp_path / "whole" / "checkpoint-8" / name).unlink()
    alone = trainer_of(lora(), tmp_path / "alone", **options)
    with pytest.raises(ConfigurationError, match="the ε of its steps is unknown"):
        alone.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))


@pytest.mark.parametrize("steps", [{"num_train_epochs": 2}, {"max_steps": 12}], ids=str)
def test_a_target_is_for_all_steps(steps: dict[str, int], tmp_path: Path) -> None:
    private = {"noise_multiplier": None, "target_epsilon": 4.0, "accountant": "gdp"}
    trainer = trainer_of(bert(), tmp_path, classes(), privacy=private, **steps, logging_steps=99)
    trainer.train()
    assert trainer.private.steps == 12
    assert 3.9 < trainer.private.epsilon(1e-5) <= 4.0


def test_training_may_go_on_and_evaluate_in_between(tmp_path: Path) -> None:
    trainer = trainer_of(bert(), tmp_path, classes(), eval_dataset=classes(7))
    trainer.train()
    first = trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] != first["eval_loss"]
    assert trainer.private.steps == 12


REFUSED: dict[str, dict[str, Any]] = {
    "leave out train_sampling_strategy=group_by_length": {
        "train_sampling_strategy": "group_by_length"
    },
    "leave out label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "leave out auto_find_batch_size": {"auto_find_batch_size": True},
    "leave out torch_compile": {"torch_compile": True},
}


@pytest.mark.parametrize("says", REFUSED)
def test_arguments_that_private_training_cannot_keep_are_named(says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        trainer_of(bert(), tmp_path, classes(), **REFUSED[says])


REFUSED_ATTRIBUTES: dict[str, dict[str, Any]] = {
    r"leave out fp16: .* \(use bf16\)": {"fp16": True},
    "leave out packing": {"packing": True},
    "leave out group_by_length": {"group_by_length": True},
    "trains on one GPU: set CUDA_VISIBLE_DEVICES": {"n_gpu": 2},
    "or use dpbench.make_private under torchrun": {"world_size": 2},
}


@pytest.mark.parametrize("says", REFUSED_ATTRIBUTES)
def test_what_only_some_machines_and_versions_have_is_refused_too(says: str) -> None:
    usual = {"fp16": False, "world_size": 1, "n_gpu": 1, "deepspeed": None, "fsdp": None}
    huggingface.check_arguments(SimpleNamespace(**usual))
    with pytest.raises(ConfigurationError, match=says):
        huggingface.check_arguments(SimpleNamespace(**usual | REFUSED_ATTRIBUTES[says]))


def test_a_loss_of_the_batch_is_refused_and_losses_of_examples_are_taken(tmp_path: Path) -> None:
    class Other(PrivateTrainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any: ...

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigurationError, match=r"compute_loss is one loss .* pass losses="):
        Other(bert(), args, privacy=Privacy(C, 1e-5, 1.0))
    with pytest.raises(ConfigurationError, match="compute_loss is one loss"):
        PrivateTrainer(
            bert(), args, privacy=Privacy(C, 1e-5, 1.0), compute_loss_func=lambda *_, **__: 0
        )

    def losses(model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits, batch["labels"], reduction="none")

    trainer = trainer_of(bert(), tmp_path, classes(), losses=losses)
    before = values(trainer.model)
    trainer.train()
    assert not torch.equal(values(trainer.model), before)


def test_labels_that_are_not_known_are_named(tmp_path: Path) -> None:
    data = [{n: x for n, x in each.items() if n != "labels"} for each in texts()]
    with pytest.raises(ConfigurationError, match="the batch has no labels: pass losses="):
        trainer_of(llama(), tmp_path, data).train()


@pytest.mark.parametrize("model", [llama, gpt2, bert, lora])
def test_losses_of_examples_are_the_model_s_own(model: Any) -> None:
    made = model().eval()
    for each in classes(4) if model is bert else texts(4):
        one = {n: torch.as_tensor(x)[None] for n, x in each.items()}
        torch.testing.assert_close(example_losses(made, one)[0], made(**one).loss)


@pytest.mark.parametrize("bf16", [{"bf16": True}, {}])
def test_16_bits_train(bf16: dict[str, bool], tmp_path: Path) -> None:
    model = lora() if bf16 else bert().bfloat16()
    trainer = trainer_of(model, tmp_path, None if bf16 else classes(), **bf16)
    before = values(model)
    trainer.train()
    assert not torch.equal(values(model), before)


def test_gradient_checkpointing_trains_the_same(tmp_path: Path) -> None:
    made = []
    for on in (False, True):
        model = lora()
        model.enable_input_require_grads()
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if on else {}
        trainer = trainer_of(model, tmp_path, gradient_checkpointing=on, **options)
        trainer.train()
        made.append(values(model))
    torch.testing.assert_close(*made)


# --- the usual loop, and the model while it trains -----------------------------------------------


def private_of(model: Any, data: Any = None, **options: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    usual = {"batch_size": 4, "max_grad_norm": C, "noise_multiplier": 0.0, "seed": 2}
    return make_private(
        model,
        torch.optim.SGD(trained, lr=0.1),
        data or texts(),
        collate_fn=transformers.default_data_collator,
        **usual | options,
    )


def test_the_loss_of_a_classifier_may_be_used_in_the_usual_loop() -> None:
    private = private_of(bert(), classes())
    batches = [batch for batch in private.loader if len(batch["labels"])]
    for batch in batches:
        loss = private.model(**batch).loss
        private.optimizer.zero_grad()
        loss.backward()
        private.optimizer.step()
    expected = bert().train()
    one_after_another(expected, batches)
    torch.testing.assert_close(values(private.model), values(expected), atol=1e-5, rtol=1e-3)


def test_the_loss_of_a_language_model_is_refused_because_it_divides_by_all_tokens() -> None:
    private = private_of(llama())
    batch = next(batch for batch in private.loader if len(batch["labels"]) > 1)
    with pytest.raises(ConfigurationError, match=r"divided by the tokens .* use private.step"):
        private.model(**batch)


def test_its_losses_of_examples_train_in_the_usual_loop_also_in_parts() -> None:
    private = private_of(llama(), physical_batch_size=2)
    batches = [*private.loader]
    for batch in batches:
        for part in private.parts(batch):
            example_losses(private.model, part).mean().backward()
        private.optimizer.step()
    expected = llama().train()
    one_after_another(expected, batches)
    torch.testing.assert_close(values(private.model), values(expected), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("encoding", [transformers.BatchEncoding, dict])
def test_encodings_of_a_tokenizer_are_batches(encoding: Any) -> None:
    def collate(items: Any) -> Any:
        return encoding(transformers.default_data_collator(items))

    model = llama()
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), texts(), batch_size=1,
        max_grad_norm=C, noise_multiplier=0.0, seed=2, collate_fn=collate,
    )  # fmt: skip
    sizes = set()
    for batch in private.loader:
        assert type(batch) is encoding
        sizes.add(len(batch["labels"]))
        private.step(batch, example_losses)
    assert 0 in sizes
    assert private.steps == EXAMPLES


@pytest.mark.parametrize("made", [llama, gpt2, lora], ids=["llama", "gpt2", "lora"])
def test_a_model_can_be_saved_copied_and_asked_for_text_while_it_trains(
    made: Any, tmp_path: Path
) -> None:
    private = private_of(made())
    batches = [*private.loader]
    for batch in batches[:2]:
        private.step(batch, example_losses)
    model = private.model
    losses = example_losses(model, batches[2])
    written = model.generate(torch.ones(5, 2, dtype=torch.long), max_new_tokens=2, do_sample=False)
    assert written.shape == (5, 4)
    losses.mean().backward()
    private.optimizer.step()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.eval()
        expected = model(batches[0]["input_ids"]).logits
    if made is lora:
        peft = pytest.importorskip("peft")
        loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    else:
        loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.eval()(batches[0]["input_ids"]).logits, expected)
    private.step(batches[3], example_losses)


def test_accelerate_may_prepare_the_usual_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    made, other = private_of(bert(), classes()), private_of(bert(), classes())
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(made.model, made.optimizer, made.loader)
    for model, optimizer, loader, backward in (
        (*prepared, accelerator.backward),
        (other.model, other.optimizer, other.loader, torch.Tensor.backward),
    ):
        for batch in loader:
            backward(example_losses(model, batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(values(made.model), values(other.model))
    assert made.steps == other.steps == EXAMPLES // 4


def test_a_promise_needs_noise_or_a_target() -> None:
    for both in ({}, {"noise_multiplier": 1.0, "target_epsilon": 3.0}):
        with pytest.raises(ConfigurationError, match="either noise_multiplier or target_epsilon"):
            Privacy(max_grad_norm=1.0, delta=1e-3, **both)
