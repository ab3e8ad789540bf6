"""Compare what processes have ended with: their weights and their learning rates.

python docs/convert_your_script/compare.py alone.pt world_*.pt
"""

import sys

import torch


def stop(text):
    print(f"compare.py: error: {text}", file=sys.stderr)
    sys.exit(2)


KEYS = ("MODEL_STATE", "LR", "FIRST_LR", "EPOCHS_TRAINED")
paths = sys.argv[1:]
results = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
for path, result in zip(paths, results, strict=True):
    missing = [key for key in KEYS if key not in result]
    if missing:
        stop(f"{path}: has no {', '.join(missing)}")
    trained = result["EPOCHS_TRAINED"]
    expected = results[0]["EPOCHS_TRAINED"]
    if trained <= 0:
        stop(f"{path}: trained 0 epochs: remove the snapshot before each run")
    if trained != expected:
        stop(f"{path}: epochs trained: {trained}, but in {paths[0]}: {expected}")
    mine = result["MODEL_STATE"]
    first = results[0]["MODEL_STATE"]
    for key in {**mine, **first}:
        if key not in mine or key not in first or mine[key].shape != first[key].shape:
            stop(f"{path}: has other weights than {paths[0]}, such as {key}")
    apart = []
    for key in first:
        difference = mine[key].double() - first[key].double()
        apart.append(difference.abs().max())
    most = torch.stack(apart).max()  # Python's max can lose a nan
    print(f"{path}: weights differ by {most:.12f}, rate {result['LR']:.6f}")
if all(result["LR"] == result["FIRST_LR"] for result in results):
    print("the rate has not changed yet: a mistake with a scheduler would not show")
