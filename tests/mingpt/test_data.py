"""mingpt/data.py and batches.py: no text is lost, and the order of the windows."""

import itertools
import os

import numpy as np
import pytest
import torch

from mingpt import batches, data
from mingpt.tokenizer import make_tokenizer
from tests.helpers.gpt_runs import TRICKY


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def prepare(path, kind, *options):
    """`data.prepare` of one path, with its cache beside it."""
    return data.prepare([str(path)], kind, path.with_name("cache"), *options)


def whole(corpus):
    """The text of a corpus, decoded."""
    decode = corpus.tokenizer.decode
    return decode(corpus.train) + decode(corpus.val)


def test_files_are_sorted_and_count_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "c/c.txt", "d/e/f.md", "d/.git/g.txt", "a.md"):
        write(tmp_path / name, name)
    (tmp_path / "d/again.txt").symlink_to("../b.txt")
    paths = ["d", "b.txt", str(tmp_path / "b.txt"), "**/*.txt", "a.md"]
    found = data.find_files(paths)
    expected = ["a.md", "b.txt", "c/c.txt", "d/e/f.md"]
    assert sorted(map(os.path.relpath, found)) == expected
    assert found == data.find_files(paths[::-1])
    with pytest.raises(SystemExit):
        data.find_files(["b.txt", "none.txt"])


@pytest.mark.parametrize("kind", ["chars", "bytes", "file"])
def test_the_tokens_are_the_text_and_nothing_is_changed(
    kind, bpe, tmp_path, monkeypatch
):
    """Also with a tokenizer that comes back from its state."""
    if kind == "file":
        kind = bpe
    text = TRICKY * 20
    for piece in (1 << 20, 50):  # whatever is read at a time
        monkeypatch.setattr(data, "PIECE", piece)
        path = tmp_path / f"{piece}/text.txt"
        write(path, text)
        corpus = prepare(path, kind)
        assert whole(corpus) == text
        assert isinstance(corpus.train, np.memmap)
        assert corpus.train.dtype == corpus.val.dtype == np.uint16
        assert max(corpus.train.max(), corpus.val.max()) < corpus.vocab_size
    again = make_tokenizer(corpus.tokenizer.state())
    ids = again.encode(TRICKY)
    assert ids == corpus.tokenizer.encode(TRICKY)
    assert again.decode(ids) == TRICKY


def test_more_than_65536_tokens_need_32_bits(tmp_path):
    # Below 0x10000, some numbers are surrogates, which are no characters.
    text = "".join(map(chr, range(0x10000, 0x20001)))
    path = tmp_path / "text.txt"
    write(path, text)
    corpus = prepare(path, "chars")
    assert corpus.vocab_size == 65537
    assert corpus.train.dtype == np.uint32
    assert whole(corpus) == text


def test_all_tokenizers_validate_on_the_same_text(bpe, tmp_path):
    for name in "abc":
        write(tmp_path / f"text/{name}.txt", f"{name}\n" + TRICKY * 5)
    texts = set()
    for kind in ("chars", "bytes", bpe):
        corpus = prepare(tmp_path / "text", kind, 0.5)
        decode = corpus.tokenizer.decode
        texts.add(decode(corpus.val).replace("<|endoftext|>", "\n"))
        rest = decode(corpus.val[1:]).replace("<|endoftext|>", "\n")
        assert corpus.val_bytes == len(rest.encode())
        ends = [*corpus.train, *corpus.val].count(corpus.tokenizer.separator)
        assert ends == (2 if kind == bpe else 0)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("texts", "train", "val"),
    [
        (["line\n" * 1000], 4505, 495),  # after the line of the cut
        (["ab\n" * 9 + "中" * 1000], 2727, 300),  # a long line: between characters
        (["x" * 900 + "\n", "y\n" * 50], 904, 98),  # two files
    ],
)
def test_a_split_shares_nothing_and_cuts_no_character(texts, train, val, tmp_path):
    for number, text in enumerate(texts):
        write(tmp_path / f"text/{number}", text)
    corpus = prepare(tmp_path / "text", "bytes")
    assert (len(corpus.train), len(corpus.val)) == (train, val)
    assert whole(corpus) == "\n".join(texts)


def test_encoded_once_and_only_for_this_text(bpe, tmp_path, monkeypatch):
    def checksum(text, tokenizer="chars", fraction=0.1):
        write(tmp_path / "text.txt", text)
        return prepare(tmp_path / "text.txt", tokenizer, fraction).checksum

    text = "ab\nc\n" * 99
    checksums = [
        checksum(text),
        checksum("cd\na\n" * 99),
        checksum(text, "bytes"),
        checksum(text, bpe),
        checksum(text, fraction=0.2),
    ]
    # The same bytes, in two files: <|endoftext|> would be elsewhere.
    for first, second in ("ab\n", "c\n"), ("a", "b\nc\n"):
        write(tmp_path / "text/x", first)
        write(tmp_path / "text/y", second)
        checksums.append(prepare(tmp_path / "text", "chars").checksum)
    assert sorted(os.listdir(tmp_path / "cache")) == sorted(checksums)
    monkeypatch.setattr(data, "encode", None)  # it would be called in vain
    assert checksum(text) == checksums[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_predicts_each_token_once(world_size):
    """All ranks have as many batches of 3 windows."""
    for n_tokens in (2, 64, 65, 66):
        windows = batches.Blocks(np.arange(n_tokens), block_size=8)
        predicted = []
        lengths = set()
        for rank in range(world_size):
            starts = batches.eval_starts(n_tokens, 8, 3, rank, world_size)
            lengths.add(len(starts))
            source, targets = windows.__getitems__(starts)
            counts = targets >= 0
            assert torch.equal(targets[counts], source[counts] + 1)
            predicted += targets[counts].tolist()
        assert sorted(predicted) == list(range(1, n_tokens))
        assert [length % 3 for length in lengths] == [0]


@pytest.mark.parametrize("n_tokens", [9, 23, 24, 100])
def test_a_pass_takes_each_window_once(n_tokens):
    """All that fits. In 100 passes, each token is trained on, and predicted."""
    sampler = batches.StepSampler(n_tokens, block_size=8, batch_size=1, seed=3)
    stream = iter(sampler)
    passes = set()
    for _ in range(100):
        starts = tuple(itertools.islice(stream, sampler.windows))
        assert sorted(starts) == [*range(min(starts), max(starts) + 1, 8)]
        assert n_tokens - len(starts) * 8 <= 2 * 8
        passes.add(starts)
    all_starts = set().union(*passes)
    # A window has a target after its last token.
    assert min(all_starts) == 0
    assert max(all_starts) == n_tokens - 1 - 8
    if n_tokens > 99:
        assert len(passes) > 90


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_takes_the_same_windows_at_every_world_size(world_size):
    """Also in a run that resumes, with steps of another size. A pass has 61 windows."""
    whole = {"n_tokens": 500, "block_size": 8, "seed": 5}
    sampler = batches.StepSampler(batch_size=1, **whole)
    alone = list(itertools.islice(sampler, 2000))
    for batch_size, start in ((3, 0), (5, 60), (12, 13), (7, 777)):
        for rank in range(world_size):
            sampler = batches.StepSampler(
                batch_size=batch_size, replica=rank, replicas=world_size, **whole
            )
            sampler.start = start
            found = list(itertools.islice(sampler, 100))
            assert found == alone[start + rank :: world_size][:100]
