"""Fine-tune a language model by LoRA: privately, by Opacus, or without privacy.

``--model NAME`` names a causal language model that Transformers can load. Without it, the model is
small and new. The examples are sequences that count upwards.
"""

import argparse
from itertools import islice

import torch
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers import default_data_collator as collate

from dpbench.integrations.huggingface import Privacy, PrivateTrainer, example_losses

DELTA, RATE, BATCH = 1e-5, 0.02, 32
PRIVACY = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}


def network(name: str | None) -> nn.Module:
    """Return a model that trains only its adapters, and the output layer if the model is new."""
    if name:
        return get_peft_model(AutoModelForCausalLM.from_pretrained(name), LoraConfig(r=8))
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, **size)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return get_peft_model(AutoModelForCausalLM.from_config(config), lora)


def sequences(number: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 16 tokens."""
    tokens = torch.randint(48, (number, 1)) + torch.arange(16)
    return [{"input_ids": each, "labels": each} for each in tokens]


def train_by_opacus(model: nn.Module, data: list[dict[str, torch.Tensor]], steps: int) -> float:
    """Train by Opacus's engine, and return ε."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model.train(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        data_loader=DataLoader(data, batch_size=BATCH, collate_fn=collate),
        **PRIVACY,
    )
    for batch in islice((batch for _ in range(steps) for batch in loader), steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.get_epsilon(DELTA)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", metavar="NAME")
parser.add_argument("--steps", type=int, default=100, metavar="N")
way = parser.add_mutually_exclusive_group()
way.add_argument("--opacus", action="store_true")
way.add_argument("--plain", action="store_true")
asked = parser.parse_args()
torch.manual_seed(0)
model, data, epsilon = network(asked.model), sequences(1024), float("inf")
told = {"per_device_train_batch_size": BATCH, "learning_rate": RATE, "max_steps": asked.steps}
args = TrainingArguments(report_to="none", save_strategy="no", disable_tqdm=True, **told)
if asked.opacus:
    epsilon = train_by_opacus(model, data, asked.steps)
elif asked.plain:
    Trainer(model, args, train_dataset=data).train()
else:
    privacy = Privacy(delta=DELTA, **PRIVACY)
    trainer = PrivateTrainer(model, args, train_dataset=data, privacy=privacy)
    trainer.train()
    epsilon = trainer.private.epsilon(DELTA)
with torch.no_grad():
    loss = example_losses(model.eval().cpu(), collate(sequences(256))).mean()
print(f"{asked.steps} steps: loss {loss:.2f}, ε {epsilon:.2f} at δ {DELTA:g}")
