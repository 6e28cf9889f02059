"""Lightning with accumulation of two batches; 4 steps."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(0, verbose=False)


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2))

    def forward(self, batch):
        return self.model(batch)

    def training_step(self, batch, _):
        """The loss."""
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _):
        """Nothing that is kept."""
        self(batch[0])

    def configure_optimizers(self):
        """Momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


data = TensorDataset(torch.randn(32, 8), torch.randint(2, (32,)))
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=1,
    accumulate_grad_batches=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
print(f"weights {sum(p.abs().sum().item() for p in model.parameters()):.6f}")
