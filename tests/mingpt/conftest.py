"""A run of mingpt.train and a tokenizer that several tests look at."""

import pytest

from tests.helpers.gpt_runs import SHARE_OF_TWO, TRICKY, long_run
from tests.helpers.made_once import made_once


@made_once
def unsplit(folder):
    """`unsplit()`: the folder of a run of two ranks that have the whole model."""
    long_run(folder, SHARE_OF_TWO, nprocs=2)
    return folder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """The path of a byte-level BPE as GPT-2's, which asks to be padded."""
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer files")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TRICKY * 9],
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    tokenizer.save(path)
    return path
