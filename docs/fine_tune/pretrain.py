"""Train a model for eight outputs, from which a model for another one can start.

python -m docs.fine_tune.pretrain
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def make_data(size, outputs):
    """Each output weighs the same 8 features: a model that found them can be reused."""
    torch.manual_seed(0)
    features = 0.3 * torch.randn(20, 8)
    weight = torch.randn(8, outputs)
    source = torch.randn(size, 20)
    return TensorDataset(source, torch.tanh(source @ features) @ weight)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.GELU())
        self.head = nn.Linear(64, 8)

    def forward(self, source):
        return self.head(self.body(source))


if __name__ == "__main__":
    loader = DataLoader(make_data(4096, 8), batch_size=256, shuffle=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(20):
        for source, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(source), targets)
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "pretrained.pt")
    print(f"saved pretrained.pt, last loss {loss.item():.4f}")
