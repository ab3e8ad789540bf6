"""The scripts of docs/fine_tune.md, on one process and on two."""

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.checks import assert_same_weights, fence
from tools.run.launch import plant, torchrun
from tools.run.processes import Program
from tools.run.results import load, same_bits
from tools.scripts import ROOT

PRETRAIN = "docs/fine_tune/pretrain.py"
TUNE = "docs/fine_tune/fine_tune.py"
SHARDED = "docs/fine_tune/sharded.py"


@pytest.fixture
def tune(tmp_path):
    """`tune(script, *options, nprocs=2)`: what it prints, beside a pretrained.pt."""
    Program(["python", ROOT / PRETRAIN], tmp_path, OMP_NUM_THREADS=1).succeed()

    def run(script, *options, nprocs=2):
        how = {"cwd": tmp_path, "nprocs": nprocs, "OMP_NUM_THREADS": 1}
        return torchrun(ROOT / script, *options, **how).stdout

    return run


def test_any_number_of_processes_goes_on_from_any_epoch(tune, tmp_path):
    """One trains 5 epochs, two are killed in epoch 8, one ends: as two at once.

    In the first 5, the body is frozen, and keeps its bits.
    """
    tuned = tmp_path / "tuned.pt"
    tune(TUNE)
    at_once = tuned.rename(tmp_path / "at_once.pt")
    tune(TUNE, "--epochs", 5, nprocs=1)
    model = load(tuned)["MODEL_STATE"]
    for name, value in load(tmp_path / "pretrained.pt").items():
        assert name.startswith("head") or same_bits(model[name], value)
    save = "        save_once(snapshot, SNAPSHOT)\n"
    kill = "        if epoch == 8:\n            os.kill(os.getpid(), 9)\n"
    plant(PRETRAIN, tmp_path / "copy")
    with pytest.raises(AssertionError, match="SIGKILL"):
        tune(plant(TUNE, tmp_path / "copy", (save, kill + save)))
    tune(TUNE, nprocs=1)
    assert_same_weights(tuned, at_once)


def test_each_rank_draws_other_numbers_in_each_epoch(tune, tmp_path):
    """Else all would drop the same units, if the model had dropout."""
    plant(PRETRAIN, tmp_path)
    draw = "        loss = test(", "        print(torch.rand(1))\n        loss = test("
    assert len({*tune(plant(TUNE, tmp_path, draw)).splitlines()}) == 30


def test_a_thawed_layer_has_a_rate_of_its_own(tune, tmp_path):
    """Adam's first step moves a weight by its rate, whatever the gradient is."""
    tune(TUNE, "--epochs", 1, "--frozen-epochs", 0, "--batch-size", 256, nprocs=1)
    tuned = load(tmp_path / "tuned.pt")["MODEL_STATE"]
    moved = tuned["body.0.bias"] - load(tmp_path / "pretrained.pt")["body.0.bias"]
    assert_close(moved.abs().max().item(), 0.001, rtol=0.1, atol=0)


@pytest.mark.waits
def test_sharded_prints_and_saves_what_ddp_does(tune, tmp_path):
    """Also if it resumes at the thaw, or after it."""
    epochs = tune(TUNE).splitlines()
    sharded = [tune(SHARDED, "--epochs", epoch) for epoch in (5, 7, 10)]
    printed = "".join(sharded).splitlines()
    assert [line for line in printed if "loss" in line] == epochs
    assert_same_weights(tmp_path / "tuned.pt", tmp_path / "tuned_sharded.pt")


def test_a_load_that_skips_other_names_is_seen():
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(1, 1)})
    body = model.state_dict()
    model["head"] = torch.nn.Linear(1, 1)
    lines = fence("docs/fine_tune.md", "strict=False")
    exec(lines, {"model": model, "state": body})
    from_ddp = {f"module.{name}": value for name, value in body.items()}
    with pytest.raises(AssertionError, match="module.body"):
        exec(lines, {"model": model, "state": from_ddp})


LLAMA = """
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
path = "llama"
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=16, num_hidden_layers=2, **sizes)
if dist.get_rank() == 0:
    LlamaForCausalLM(config).save_pretrained(path)
dist.barrier()
with torch.device("meta"):
    model = fully_shard(LlamaForCausalLM(config), mesh=mesh)
model.to_empty(device="cpu")
PARTS
expected = load_file("llama/model.safetensors")
found = load_file("parts/model-00001-of-00001.safetensors")
torch.testing.assert_close(found, expected, rtol=0, atol=0)

WHOLE = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
torch.manual_seed(0)
both = torch.randint(16, (2, 8))
labels = both.clone()
labels[1, :5] = -100
tokens, labels, all_labels = both[[dist.get_rank()]], labels[[dist.get_rank()]], labels
TUNE
whole = LlamaForCausalLM.from_pretrained(path)
whole(input_ids=both, labels=all_labels).loss.backward()
expected = {name: weight - weight.grad for name, weight in whole.named_parameters()}
dist.barrier()
torch.testing.assert_close(load_file("tuned/model.safetensors"), expected)
"""


@pytest.mark.waits
def test_a_model_of_hugging_face(tmp_path):
    """Two ranks make the step of one, and read and write its folders in parts."""
    pytest.importorskip("transformers")
    parts = fence("docs/shard_your_model.md", "HuggingFaceStorageReader")
    tune = fence("docs/fine_tune.md", '"tuned"').replace("bfloat16", "float32")
    step = "for weight in model.parameters():\n    weight.data -= weight.grad\n"
    tune = tune.replace("\nweights =", f"loss.backward()\n{step}\nweights =")
    script = tmp_path / "llama.py"
    script.write_text(LLAMA.replace("PARTS", parts).replace("TUNE", tune))
    torchrun(script, cwd=tmp_path, real=True, OMP_NUM_THREADS=1)


LORA = """
model = AutoModelForCausalLM.from_pretrained(path, attention_bias=True)
torch.manual_seed(0)
for block in model.model.layers:
    torch.nn.init.normal_(block.self_attn.q_proj.bias)
WRAP
for block in [*model.model.layers, model]:
    fully_shard(block, mesh=mesh)
optimizer = torch.optim.Adam(filter(lambda x: x.requires_grad, model.parameters()), 0.1)
tokens = torch.arange(8)[None]
for _ in range(2):
    before = model(input_ids=tokens, labels=tokens)
    before.loss.backward()
    optimizer.step()
expected = model(input_ids=tokens).logits
assert (expected - before.logits).abs().max() > 0.01
MERGE
dist.barrier()
merged = LlamaForCausalLM.from_pretrained("merged")
torch.testing.assert_close(merged(input_ids=tokens).logits, expected)
"""


@pytest.mark.waits
def test_lora_is_merged(tmp_path):
    """The plain model computes what the frozen one and its matrices do."""
    pytest.importorskip("transformers")
    start = LLAMA.partition("with torch.device")[0]
    whole = LLAMA[LLAMA.index("WHOLE =") :].partition("\n")[0]
    lora = LORA.replace("WRAP", fence("docs/fine_tune.md", "class LoRA"))
    lora = lora.replace("MERGE", fence("docs/fine_tune.md", '"merged"'))
    script = tmp_path / "lora.py"
    script.write_text(f"{start}from torch import nn\n{whole}\n{lora}")
    torchrun(script, cwd=tmp_path, real=True, OMP_NUM_THREADS=1)
