"""Hugging Face's Trainer: accumulation, evaluation and clipping of gradients; 6 steps."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)


class Tokens(Dataset):
    """Random sentences."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=TrainingArguments(
        "checkpoints",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
)
trainer.train()
print(f"loss {trainer.evaluate()['eval_loss']:.6f}")
