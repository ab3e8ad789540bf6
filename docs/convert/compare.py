"""Compare what processes have ended with: their weights and their learning rates.

python docs/convert/compare.py alone.pt world_*.pt
"""

import sys

import torch

paths = sys.argv[1:]
results = [torch.load(path, weights_only=True) for path in paths]
for path, result in zip(paths, results, strict=True):
    differences = [
        (result["MODEL_STATE"][key] - value).abs().max().item()
        for key, value in results[0]["MODEL_STATE"].items()
    ]
    print(f"{path}: weights differ by {max(differences):.12f}, rate {result['LR']:.6f}")
