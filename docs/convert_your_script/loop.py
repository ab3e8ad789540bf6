"""The shortest training that shows something. Parent: none

python docs/convert_your_script/loop.py
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(512, 20), torch.randn(512, 1))
model = torch.nn.Linear(20, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True)
for epoch in range(3):
    for source, target in loader:
        output = model(source.to(device))
        loss = torch.nn.functional.mse_loss(output, target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: last loss {loss.item():.6f}")
torch.save(model.state_dict(), "loop.pt")
