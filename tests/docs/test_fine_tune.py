"""The scripts of docs/fine_tune.md, on one process and on two."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing import assert_close

from tests.helpers.checks import assert_same_weights, fence
from tools.run.launch import copy_script, torchrun
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
    copy_script(PRETRAIN, tmp_path / "copy")
    with pytest.raises(AssertionError, match="SIGKILL"):
        tune(copy_script(TUNE, tmp_path / "copy", (save, kill + save)))
    tune(TUNE, nprocs=1)
    assert_same_weights(tuned, at_once)


def test_each_rank_draws_other_numbers_in_each_epoch(tune, tmp_path):
    """Else all would drop the same units, if the model had dropout."""
    copy_script(PRETRAIN, tmp_path)
    draw = "        loss = test(", "        print(torch.rand(1))\n        loss = test("
    assert len({*tune(copy_script(TUNE, tmp_path, draw)).splitlines()}) == 30


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
    lines = fence("docs/fine_tune.md", "missing, unexpected")
    exec(lines, {"model": model, "state": body})
    from_ddp = {f"module.{name}": value for name, value in body.items()}
    with pytest.raises(AssertionError, match="module.body"):
        exec(lines, {"model": model, "state": from_ddp})


PARTS = """
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=16, num_hidden_layers=2, **sizes)
if dist.get_rank() == 0:
    LlamaForCausalLM(config).save_pretrained("llama")
dist.barrier()
with torch.device("meta"):
    model = fully_shard(LlamaForCausalLM(config), mesh=mesh)
model.to_empty(device="cpu")
LINES
expected = load_file("llama/model.safetensors")
found = load_file("parts/model-00001-of-00001.safetensors")
torch.testing.assert_close(found, expected, rtol=0, atol=0)
"""


@pytest.mark.waits
def test_a_model_of_hugging_face(tmp_path):
    """Two ranks read and write its folders in parts."""
    pytest.importorskip("transformers")
    lines = fence("docs/shard_your_model.md", "HuggingFaceStorageReader")
    script = tmp_path / "parts.py"
    script.write_text(PARTS.replace("LINES", lines))
    torchrun(script, cwd=tmp_path, real=True, OMP_NUM_THREADS=1)


@pytest.fixture
def llama(tmp_path):
    """`llama(*options, changes=[], nprocs=2)` runs the page's llama.py."""
    pytest.importorskip("transformers")
    (tmp_path / "lora.py").write_text(fence("docs/fine_tune.md", "class LoRA"))
    script = tmp_path / "llama.py"

    def run(*options, changes=(), nprocs=2):
        text = fence("docs/fine_tune.md", "AutoModelForCausalLM")
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        script.write_text(text)
        how = {"cwd": tmp_path, "nprocs": nprocs, "OMP_NUM_THREADS": 1}
        words = "--lr", 0.003, "--epochs", 2, *options
        torchrun(script, *words, real=True, **how)

    return run


EMPTY = "model.to_empty(device=device)\n"


@pytest.mark.waits
def test_two_ranks_fine_tune_a_gemma_as_one_does(llama, tmp_path):
    """Answers differ in length. One is killed in the second epoch; two go on.

    The one to compare with takes a step in four passes. Head and embedding are one
    weight, and no file has the embedding's scale.
    """
    load_file = pytest.importorskip("safetensors.torch").load_file
    gemma = [
        ("LlamaConfig\n", "Gemma3TextConfig as LlamaConfig\n"),
        (EMPTY, f"{EMPTY}for x in model.buffers():\n    x.fill_(world_size)\n"),
    ]
    epoch = "    loader.sampler.set_epoch(epoch)\n"
    with pytest.raises(AssertionError, match="SIGKILL"):
        kill = f"    if epoch == 1:\n        os.kill(os.getpid(), 9)\n{epoch}"
        llama("--save-every", 32, changes=[*gemma, (epoch, kill)], nprocs=1)
    llama(changes=gemma)
    resumed = load_file(tmp_path / "tuned" / "model.safetensors")
    for folder in tmp_path.glob("tuned*"):
        shutil.rmtree(folder)
    llama("--accumulate", 4, changes=gemma, nprocs=1)
    alone = load_file(tmp_path / "tuned" / "model.safetensors")
    assert_close(resumed, alone, rtol=0, atol=1e-4)


LOGITS = "logits = model(input_ids=torch.arange(8, device=device)[None]).logits\n"
BIAS = """        for block in model.model.layers:
            torch.nn.init.normal_(block.self_attn.q_proj.bias)
"""
MERGED = """
    plain = AutoModelForCausalLM.from_pretrained(name)
    torch.testing.assert_close(plain(input_ids=torch.arange(8)[None]).logits, logits)
"""


@pytest.mark.waits
def test_lora_is_merged(llama, tmp_path):
    """The plain model computes what the frozen one and its matrices do."""
    add, saved = "        lora.add_matrices(model)\n", "weights = state_dict.get_model"
    moved = f"{LOGITS}assert (logits - before).abs().max() > 0.01\n"
    end = "    # tokenizer.save_pretrained(name)\n"
    changes = [
        ("LlamaConfig(", "LlamaConfig(attention_bias=True, "),
        (add, BIAS + add),
        ("\nwhile step <", f"\n{LOGITS}before = logits\nwhile step <"),
        (saved, moved + saved),
        (end, end + MERGED),
    ]
    llama("--lora", changes=changes)
    saved = dcp.FileSystemReader(tmp_path / "tuned_lora.000064").read_metadata()
    weights = {x for x in saved.state_dict_metadata if x.startswith("model.")}
    assert {x[-9:] for x in weights} == {".a.weight", ".b.weight"}
