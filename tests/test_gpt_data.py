"""mingpt/data.py: no text is lost, none leaks, and a step has its windows for ever."""

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ladder.rungs import ROOT
from mingpt import batches, data

END = "<|endoftext|>"
# All that a cut could go wrong at: CRLF, a BOM, tabs, blank lines, 1 to 4 bytes.
TRICKY = (
    "\ufeffFirst line, it's 12345 one_two\r\n\r\n\tBär  \n\n 中文字。\n\u3000\u3000"
    "中文 字 x.\n/path\n    def f(x):\n        return 'a' \n🙂 \0 e\u0301\n"
)


def fork(function, *arguments):
    """A process that calls the function, started from this one."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def check_fails(capfd, words, function, *arguments):
    """The function ends with one line on stderr, which has the words, and status 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    line = capfd.readouterr().err
    assert ended.value.code == 2
    assert re.fullmatch(rf".*error: .*{words}.*\n", line), line


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def content(text):
    """All of a `Text`, as it is split and encoded."""
    return b"\n".join(b"".join(document.read()) for document in text.documents)


@pytest.fixture(scope="module")
def train_bpe():
    """A function that trains a byte-level BPE, as GPT-2's, and returns its JSON."""
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer files")

    def train(text=TRICKY * 9, prefix=False, size=400, alphabet=True, special=(END,)):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.pre_tokenizer = level
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            show_progress=False,
            special_tokens=list(special),
            initial_alphabet=level.alphabet() if alphabet else [],
        )
        tokenizer.train_from_iterator([text], trainer)
        return tokenizer

    return train


@pytest.fixture(scope="module")
def bpe(train_bpe, tmp_path_factory):
    """The path of its file."""
    path = str(tmp_path_factory.mktemp("bpe") / "tokenizer.json")
    train_bpe().save(path)
    return path


# Find the text


def test_default_text_is_the_manual(monkeypatch, capfd):
    text = data.load_text()
    assert len(text) == len(content(text)) > 100_000
    assert b"assert" in content(text)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    check_fails(capfd, "pydoc_data.*python-source", data.load_text)


def test_python_source_has_no_tests(monkeypatch, capfd, tmp_path):
    names = data.python_source()
    assert any(name.endswith(os.path.join("", "argparse.py")) for name in names)
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert not [name for name in names if left_out & set(name.split(os.sep))]
    for name in ("b.py", "a.py", "test/c.py", "a.txt", "d/tests/e.py", "d/f.py"):
        write(tmp_path / "lib" / name, name)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path / "lib"))
    assert content(data.load_text("python-source")) == b"a.py\nb.py\nd/f.py"
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path / "none"))
    check_fails(capfd, "no .py file in .*none", data.load_text, "python-source")


def test_files_are_sorted_and_count_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "d/c.txt", "d/e/f.txt", "d/.hidden", "d/.git/g.txt", "a.md"):
        write(tmp_path / name, name)
    write(tmp_path / "d/empty.txt", "")
    (tmp_path / "d/loop").symlink_to("..")  # leads to b.txt and a.md
    (tmp_path / "d/again.txt").symlink_to("../b.txt")
    (tmp_path / "linked").symlink_to("d/e")
    for paths, expected in (
        ("b.txt", "b.txt"),
        (["d", "b.txt", "a.md"], "a.md b.txt d/c.txt d/e/f.txt"),
        (["a.md", tmp_path / "b.txt", "./b.txt", "*.txt"], "b.txt a.md"),
        ("*", "a.md b.txt d/c.txt d/e/f.txt"),
        ("**/*.txt", "b.txt d/c.txt d/e/f.txt"),
        ("**", "a.md b.txt d/c.txt d/e/f.txt"),
        ("linked", "d/e/f.txt"),
        ("d", "b.txt d/c.txt d/e/f.txt a.md"),
    ):
        assert content(data.load_text(paths)).decode().split() == expected.split()


def test_a_name_with_the_letters_of_a_glob_is_a_file(tmp_path):
    path = write(tmp_path / "a[1]*.txt", "text")
    assert content(data.load_text(path)) == b"text"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.txt", "there is no .*none.txt"),
        ("*.none", "there is no .*none"),
        ("empty.txt", "no text in .*empty.txt"),
        ("folder", "no text in .*folder"),
        ("loop", "cannot read .*loop: Too many levels"),
        ("folder_of_loops", "cannot read .*loop: Too many levels"),
        ("pipe", "pipe: it is not a regular file"),
        ("latin.txt", "latin.txt is not UTF-8: in line 2, byte 7 of the file is 0xe9"),
    ],
)
def test_bad_text_ends_in_one_line(name, words, tmp_path, capfd):
    write(tmp_path / "empty.txt", "")
    write(
        tmp_path / "latin.txt",
        "abc\nd\N{LATIN SMALL LETTER E WITH ACUTE}".encode()[:-2] + b"d\xe9 f",
    )
    write(tmp_path / "folder/.hidden", "hidden")
    (tmp_path / "folder_of_loops").mkdir()
    for loop in ("loop", "folder_of_loops/loop"):
        (tmp_path / loop).symlink_to(tmp_path / loop)
    os.mkfifo(tmp_path / "pipe")
    check_fails(
        capfd, words, data.prepare, tmp_path / name, "chars", tmp_path / "cache"
    )
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, capfd, monkeypatch):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "closed/b.txt", "b")
    scandir = os.scandir

    def scan(path):  # root, who runs the tests in a container, may read every folder
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    check_fails(capfd, "cannot read .*closed: Permission", data.load_text, tmp_path)


def test_the_place_of_a_bad_byte_is_found_in_any_piece(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 7)  # characters are cut, too
    good = ("äöü🙂\n" * 5).encode()
    for bad, byte in ((b"\xff", "ff"), (b"a\xc3", "c3"), ("🙂".encode()[:3], "f0")):
        path = write(tmp_path / "bad.txt", good + bad)
        place = len(good) + bad.index(int(byte, 16)) + 1
        words = f"in line 6, byte {place} of the file is 0x{byte}"
        check_fails(capfd, words, data.load_text, path)


# Split it


def split(texts, fraction=0.1):
    documents = [data.Document(str(x), x, 0, len(x)) for x in texts]
    return data.Text("", documents, "").split(fraction)


def test_a_split_loses_nothing_and_shares_nothing():
    draw = random.Random(0)
    for _ in range(2000):
        texts = [
            "".join(draw.choices("ab\n中🙂", (9, 9, 2, 1, 1), k=draw.randint(1, 40)))
            for _ in range(draw.randint(1, 5))
        ]
        whole = "\n".join(texts).encode()
        train, val = split([x.encode() for x in texts], draw.random() or 0.5)
        parts = content(train), content(val)
        # Between two documents, the newline may be in neither part.
        assert whole in (parts[0] + parts[1], b"\n".join(parts)), (texts, parts)
        assert parts[0]
        for part in parts:
            part.decode()  # no character is cut


def test_a_split_is_where_a_line_ends():
    lines = b"".join(b"line %d\n" % number for number in range(1000))
    train, val = split([lines])
    assert content(train).endswith(b"\n") and content(val).startswith(b"line ")
    assert 0.08 < len(val) / len(lines) <= 0.1
    # Few documents: where one of them ends. Many: not inside the last one.
    train, val = split([b"x" * 900, b"y" * 100])
    assert (content(train), content(val)) == (b"x" * 900, b"y" * 100)
    train, val = split([b"x" * 900, b"y" * 95])
    assert (content(train), content(val)) == (b"x" * 900, b"y" * 95)


def test_a_split_without_lines_is_between_characters():
    train, val = split(["中".encode() * 1000])
    assert (len(train), len(val)) == (2700, 300)
    train, val = split(["中".encode() * 1001])
    assert len(train) + len(val) == 3003 and 290 < len(val) <= 300
    train, val = split([b"title\n" + b"x" * 1000])
    assert len(val) == 100
    train, val = split([b"x" * 1000 + b"\n" + b"y" * 10])
    assert len(val) == 101  # the last line alone would be too short
    train, val = split([b"x"])
    assert (len(train), len(val)) == (1, 0)


def test_validation_has_about_a_megabyte_at_most(monkeypatch):
    monkeypatch.setattr(data, "MAX_VALIDATION", 500)
    _, val = split([b"line\n" * 10_000] * 3)
    assert 490 < len(val) <= 500


# Turn text into numbers


@pytest.fixture(params=["chars", "bytes", "bpe"])
def kind(request):
    return request.getfixturevalue("bpe") if request.param == "bpe" else request.param


def test_the_tokens_are_the_text_and_nothing_is_changed(kind, tmp_path):
    path = write(tmp_path / "text.txt", TRICKY * 20)
    corpus = data.prepare(path, kind, tmp_path / "cache")
    decode = corpus.tokenizer.decode
    assert decode(corpus.train) + decode(corpus.val) == TRICKY * 20
    assert corpus.train.dtype == corpus.val.dtype == np.uint16
    assert max(corpus.train.max(), corpus.val.max()) < corpus.vocab_size
    assert f"{len((TRICKY * 20).encode()):,} bytes" in corpus.description
    assert "lost" not in corpus.description


def test_all_tokenizers_validate_on_the_same_text(bpe, tmp_path):
    for name in "abc":
        write(tmp_path / f"text/{name}.txt", f"{name}\n" + TRICKY * 5)
    found = {}
    for kind in ("chars", "bytes", bpe):
        corpus = data.prepare(tmp_path / "text", kind, tmp_path / "cache", 0.5)
        text = corpus.tokenizer.decode(corpus.val).replace(END, "\n")
        first = corpus.tokenizer.decode(corpus.val[:1])
        found[kind] = text, corpus.val_bytes + len(first.encode())
    assert len(set(found.values())) == 1
    text, size = found["chars"]
    assert size == len(text.encode()) > 500


def test_separator_between_documents(bpe, train_bpe, tmp_path):
    for name in "abc":
        write(tmp_path / f"text/{name}.txt", name * 10)
    plain = str(tmp_path / "plain.json")
    train_bpe(special=()).save(plain)
    for kind, separator in (
        ("chars", "\n"),
        ("bytes", "\n"),
        (bpe, END),
        (plain, "\n"),
    ):
        corpus = data.prepare(tmp_path / "text", kind, tmp_path / "cache", 0.01)
        train = corpus.tokenizer.decode(corpus.train)
        assert train == separator.join(["a" * 10, "b" * 10, "c" * 9])
        if kind == bpe:
            assert list(corpus.train).count(corpus.tokenizer.separator) == 2


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_first_bytes_are_exact(train_bpe, trim_offsets):
    """Byte by byte: a token may be a part of a character, or have a space in front."""
    from tokenizers import processors

    tokenizer = train_bpe()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    table = {c: b for b, c in data_bytes().items()}
    for prefix in (False, True):
        tokenizer.pre_tokenizer.add_prefix_space = prefix
        ours = data.FileTokenizer(tokenizer.to_str())
        for text in (
            "def f",
            "    def",
            "\n\nx",
            "🙂",
            "中文",
            " 中",
            "한",
            "\tx",
            "a",
        ):
            ids = ours.encode(text)
            tokens = [tokenizer.id_to_token(i) for i in ids]
            whole = bytes(table[c] for token in tokens for c in token)
            added = len(whole) - len(text.encode())
            assert added == (prefix and text[0] != " ")
            assert ours.first_bytes(text) == len(tokens[0]) - added, (text, tokens)


def data_bytes():
    """The character that GPT-2's tokenizers have for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_first_bytes_of_a_tokenizer_like_llamas(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer files")
    letters = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "b"]
    model = tokenizers.models.BPE(
        vocab={x: i for i, x in enumerate(letters)},
        merges=[("▁", "a")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    ours = data.FileTokenizer(tokenizer.to_str())
    assert [ours.first_bytes(x) for x in ("ab", "b", " a", "中", "\n")] == [
        1,
        0,
        0,
        0,
        0,
    ]
    assert not ours.can_be_cut
    tokenizer.normalizer = spaces
    ours = data.FileTokenizer(tokenizer.to_str())
    assert [ours.first_bytes(x) for x in ("ab", " ab", "中", "\n")] == [1, 2, 1, 1]


def test_tokens_do_not_depend_on_where_the_text_is_cut(
    train_bpe, bpe, tmp_path, monkeypatch
):
    text = TRICKY * 40
    path = write(tmp_path / "text.txt", text)
    whole = data.prepare(path, bpe, tmp_path / "whole")
    monkeypatch.setattr(data, "PIECE", 50)
    corpus = data.prepare(path, bpe, tmp_path / "pieces")
    assert corpus.checksum == whole.checksum
    tokenizer = corpus.tokenizer
    pieces = list(tokenizer.pieces(data.load_text(path).documents[0].text()))
    assert len(pieces) > 50 and "".join(pieces) == text
    assert sum(map(tokenizer.encode, pieces), []) == tokenizer.encode(text)
    # The cut matters: most other places would change the tokens.
    places = range(1, len(TRICKY))
    parts = [(TRICKY[:place], TRICKY[place:]) for place in places]
    together = tokenizer.encode(TRICKY)
    wrong = sum(tokenizer.encode(x) + tokenizer.encode(y) != together for x, y in parts)
    assert wrong > len(parts) / 4
    # A tokenizer that puts a space in front of each text gets it in one piece.
    tokenizer = data.FileTokenizer(train_bpe(prefix=True).to_str())
    assert list(tokenizer.pieces([text[:900], text[900:]])) == [text]


def test_a_text_without_a_place_for_a_cut_is_not_cut(bpe, monkeypatch):
    searched = []

    class Cut:
        def match(self, text):
            searched.append(len(text))

    tokenizer = data.read_tokenizer(bpe)
    texts = ["." * 100] * 64
    assert list(tokenizer.pieces(texts)) == ["".join(texts)]
    monkeypatch.setattr(tokenizer, "CUT", Cut())
    list(tokenizer.pieces(texts))
    assert sum(searched) < 2 * 6400  # not again and again from the beginning


def test_memory_is_for_a_few_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 4096)
    path = write(tmp_path / "text.txt", "some text\n" * 400_000)
    tracemalloc.start()
    corpus = data.prepare(path, "bytes", tmp_path / "cache", 0.001)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(corpus.train) > 3_900_000
    assert peak < 3_000_000


def test_truncation_and_padding_in_the_file_are_ignored(train_bpe, tmp_path):
    tokenizer = train_bpe()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "text.txt", TRICKY * 3)
    corpus = data.prepare(path, str(tmp_path / "tokenizer.json"), tmp_path / "cache")
    tokens = [*corpus.train, *corpus.val]
    assert corpus.tokenizer.decode(tokens) == TRICKY * 3


def test_a_tokenizer_that_loses_text_is_told(train_bpe, tmp_path):
    path = str(tmp_path / "tokenizer.json")
    train_bpe("abc " * 99, alphabet=False).save(path)
    text = write(tmp_path / "text.txt", "abc\n" * 99)
    corpus = data.prepare(text, path, tmp_path / "cache")
    assert "Some of the text is lost" in corpus.description


def test_more_than_65536_tokens_need_32_bits(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    path = write(tmp_path / "text.txt", text)
    corpus = data.prepare(path, "chars", tmp_path / "cache")
    assert corpus.vocab_size == 65537
    assert corpus.train.dtype == np.uint32
    assert corpus.tokenizer.decode([*corpus.train, *corpus.val]) == text


def test_vocabulary_reaches_to_the_highest_number(train_bpe):
    state = json.loads(train_bpe().to_str())
    vocabulary = state["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 70_000
    assert data.FileTokenizer(json.dumps(state)).vocab_size == 70_001


def test_a_tokenizer_comes_back_from_its_state(kind, tmp_path):
    path = write(tmp_path / "text.txt", TRICKY)
    tokenizer = data.prepare(path, kind, tmp_path / "cache").tokenizer
    again = data.make_tokenizer(json.loads(json.dumps(tokenizer.state())))
    ids = again.encode(TRICKY)
    assert type(ids) is list and type(ids[0]) is int
    assert ids == tokenizer.encode(TRICKY)
    assert again.decode(ids) == again.decode(np.array(ids)) == TRICKY
    assert again.decode(torch.tensor(ids)) == TRICKY
    assert again.vocab_size == tokenizer.vocab_size
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""


def test_an_unknown_character_is_named(tmp_path, capfd):
    tokenizer = data.CharTokenizer("\n abc")
    words = r"no 'é' \(U\+00E9, LATIN SMALL LETTER E WITH ACUTE\)"
    check_fails(capfd, words, tokenizer.encode, "abécé")
    check_fails(capfd, r"no '\\udcff' \(U\+DCFF, without", tokenizer.encode, "\udcff")
    path = write(tmp_path / "text.txt", "abc é\n")
    check_fails(capfd, words, data.prepare, path, tokenizer.state(), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.json"))


def test_a_prompt_that_is_not_utf8(bpe):
    prompt = os.fsdecode(b"a\xff")
    assert data.ByteTokenizer().encode(prompt) == [ord("a"), 0xFF]
    tokenizer = data.read_tokenizer(bpe)
    assert tokenizer.decode(tokenizer.encode(prompt)) == "a\N{REPLACEMENT CHARACTER}"


def test_a_text_can_be_encoded_with_the_tokenizer_of_a_snapshot(tmp_path):
    path = write(tmp_path / "text.txt", "abc\n" * 9)
    state = data.CharTokenizer("\n abcd").state()
    corpus = data.prepare(path, state, tmp_path / "cache")
    assert corpus.tokenizer.state() == state
    assert list(corpus.train[:4]) == [2, 3, 4, 0]
    other = data.prepare(path, "chars", tmp_path / "cache")
    assert list(other.train[:4]) == [1, 2, 3, 0]


def test_bad_tokenizer_files_end_in_one_line(bpe, tmp_path, capfd, monkeypatch):
    text = write(tmp_path / "text.txt", "text")
    for path, words in (
        (str(tmp_path / "none.json"), "choose chars, bytes, or a file"),
        (str(tmp_path), "cannot read .*: Is a directory"),
        (write(tmp_path / "a.json", '{"no": 1}'), "a.json is no file of the package"),
        (write(tmp_path / "b.json", b"\xff\xfe"), "b.json is no file .*not UTF-8"),
    ):
        check_fails(capfd, words, data.prepare, text, path, tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    check_fails(capfd, "pip install tokenizers", data.prepare, text, bpe)
    for fraction in (0, 1, 2, float("nan")):
        words = f"val_fraction is {fraction}"
        check_fails(capfd, words, data.prepare, text, "chars", "cache", fraction)


# Encode once


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text.txt", "".join(f"line {i}\n" for i in range(5000)))


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A function that says how often a text was encoded, by whatever process."""
    log, encode = tmp_path / "log", data.encode

    def count(*arguments):
        with open(log, "a") as file:
            file.write("x")
        encode(*arguments)

    monkeypatch.setattr(data, "encode", count)
    return lambda: len(log.read_text()) if log.exists() else 0


def facts(corpus):
    parts = corpus.train.tobytes(), corpus.val.tobytes()
    return *parts, corpus.val_bytes, corpus.checksum, corpus.tokenizer.state()


def test_encoded_once_and_only_for_this_text(text, counted, bpe, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = data.prepare(text, "chars", cache)
    again = data.prepare(text, "chars", cache)
    assert counted() == 1 and facts(first) == facts(again)
    assert isinstance(again.train, np.memmap) and not again.train.flags.writeable
    # The same size and time, another content.
    status = os.stat(text)
    write(tmp_path / "text.txt", (tmp_path / "text.txt").read_text()[::-1])
    os.utime(text, ns=(status.st_atime_ns, status.st_mtime_ns))
    other = data.prepare(text, "chars", cache)
    assert counted() == 2 and other.checksum != first.checksum
    for tokenizer in ("bytes", bpe):
        data.prepare(text, tokenizer, cache)
    assert counted() == 4
    assert len(data.prepare(text, "chars", cache, 0.2).val) > 1.9 * len(first.val)
    assert counted() == 5
    monkeypatch.setattr(data, "FORMAT", data.FORMAT + 1)
    data.prepare(text, "chars", cache)
    assert counted() == 6
    # A tokenizer file with the same name and another content.
    path = tmp_path / "tokenizer.json"
    for size in (300, 310):
        content = json.loads((tmp_path / bpe).read_text())
        content["model"]["merges"] = content["model"]["merges"][: size - 260]
        write(path, json.dumps(content))
        data.prepare(text, str(path), cache)
    assert counted() == 8


def test_where_one_file_ends_matters(counted, tmp_path):
    """The same bytes, split into files elsewhere: <|endoftext|> would be elsewhere."""
    for parts in (("ab\n", "c\n"), ("a", "b\nc\n"), ("ab\nc\n",)):
        for name, part in zip("xyz", parts, strict=False):
            write(tmp_path / f"{len(parts)}{parts[0]!r}/{name}", part)
        data.prepare(
            tmp_path / f"{len(parts)}{parts[0]!r}", "chars", tmp_path / "cache"
        )
    assert counted() == 3


def test_checksum_tells_vocabularies_apart(tmp_path):
    """The same numbers, but for other characters."""
    found = []
    for text in ("abab\n" * 9, "cdcd\n" * 9):
        path = write(tmp_path / "text.txt", text)
        found.append(data.prepare(path, "chars", tmp_path / "cache"))
    assert np.array_equal(found[0].train, found[1].train)
    assert found[0].checksum != found[1].checksum


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: next(cache.glob("*.val.bin")).unlink(),
        lambda cache: next(cache.glob("*.train.bin")).write_bytes(b"12"),
        lambda cache: next(cache.glob("*.json")).write_text('{"dtype": "<u2", "tr'),
        lambda cache: next(cache.glob("*.json")).write_text("[]"),
        lambda cache: next(cache.glob("*.json")).write_text("{}"),
    ],
)
def test_a_damaged_cache_is_written_again(damage, text, counted, tmp_path):
    whole = facts(data.prepare(text, "chars", tmp_path / "cache"))
    damage(tmp_path / "cache")
    assert facts(data.prepare(text, "chars", tmp_path / "cache")) == whole
    assert counted() == 2


def prepare_and_die(text, cache, moment):
    """Encode, and get SIGKILL when so many bytes are written."""
    replacing = data.utils.replacing
    left = [moment]

    @contextlib.contextmanager
    def watched(path):
        with replacing(path) as file:
            write = file.write

            class File:
                def write(self, content):
                    for byte in (content[: left[0]], content[left[0] :]):
                        if left[0] <= 0:
                            file.flush()
                            os.kill(os.getpid(), signal.SIGKILL)
                        left[0] -= len(byte)
                        write(byte)

            yield File()

    data.utils.replacing = watched
    data.prepare(text, "chars", cache)


@pytest.mark.parametrize("part", [0.0, 0.5, 0.899, 0.95, 1.0, 1.001])
def test_a_killed_encoder_leaves_nothing_that_counts(part, text, counted, tmp_path):
    whole = facts(data.prepare(text, "chars", tmp_path / "whole"))
    cache, tokens = tmp_path / "cache", len(whole[0]) + len(whole[1])
    process = fork(prepare_and_die, text, cache, int(part * tokens))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not list(cache.glob("*.json")) and list(cache.glob("*.tmp"))
    # What it left goes, also if the next text is another one.
    other = write(tmp_path / "other.txt", "other\n" * 99)
    data.prepare(other, "chars", cache)
    assert not list(cache.glob("*.tmp"))
    assert facts(data.prepare(text, "chars", cache)) == whole
    assert counted() == 4


def prepare_slowly(text, cache, started, go_on, outcome):
    """What `started` says when the text is encoded; `go_on` lets it go on."""
    encode = data.encode

    def slow(*arguments):
        started.release()
        go_on.acquire()
        encode(*arguments)

    data.encode = slow
    corpus = data.prepare(text, "chars", cache)
    outcome.put(corpus.checksum)


def wait_until_said(words, times, capfd):
    """Read what processes print until they have printed the words so many times."""
    said, deadline = "", time.monotonic() + 60
    while said.count(words) < times:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
        said += capfd.readouterr().out


def test_one_process_encodes_while_the_others_wait(text, counted, tmp_path, capfd):
    context = multiprocessing.get_context("fork")
    started, go_on = context.Semaphore(0), context.Semaphore(0)
    outcome, cache = context.Queue(), tmp_path / "cache"
    arguments = text, cache, started, go_on, outcome
    processes = [fork(prepare_slowly, *arguments) for _ in range(4)]
    assert started.acquire(timeout=60)
    wait_until_said("waiting for another process", 3, capfd)
    assert not started.acquire(block=False) and outcome.empty()
    go_on.release()
    assert len({outcome.get(timeout=60) for _ in processes}) == 1
    for process in processes:
        process.join(60)
    assert counted() == 1
    assert facts(data.prepare(text, "chars", cache)) == facts(
        data.prepare(text, "chars", tmp_path / "alone")
    )


def test_nobody_waits_for_a_dead_encoder(text, tmp_path, capfd):
    context = multiprocessing.get_context("fork")
    started, go_on, outcome = (
        context.Semaphore(0),
        context.Semaphore(0),
        context.Queue(),
    )
    arguments = text, tmp_path / "cache", started, go_on, outcome
    first = fork(prepare_slowly, *arguments)
    assert started.acquire(timeout=60)
    second = fork(prepare_slowly, *arguments)
    wait_until_said("waiting for another process", 1, capfd)
    assert not started.acquire(block=False)
    os.kill(first.pid, signal.SIGKILL)
    assert started.acquire(timeout=60)
    go_on.release()
    assert outcome.get(timeout=60)
    second.join(60)
    first.join(60)


def prepare_on_a_small_disk(text, cache, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    data.prepare(text, "chars", cache)


@pytest.mark.parametrize("size", [5_000, 50_000])
def test_a_full_disk_ends_in_one_line(size, text, tmp_path, capfd):
    cache = tmp_path / "cache"
    process = fork(prepare_on_a_small_disk, text, cache, size)
    process.join(60)
    assert process.exitcode == 2
    line = capfd.readouterr().err
    assert re.fullmatch(r".*error: cannot keep the tokens in .*cache: .+\n", line), line
    assert {x.suffix for x in cache.iterdir()} == {".lock"}
    assert len(data.prepare(text, "chars", cache).train) > 40_000


def test_a_cache_that_cannot_be_written_ends_in_one_line(text, tmp_path, capfd):
    write(tmp_path / "file", "")
    for cache in (tmp_path / "file", tmp_path / "file/cache", "/proc/cache"):
        words = f"cannot keep the tokens in {cache}: "
        check_fails(capfd, words, data.prepare, text, "chars", cache)


def test_a_whole_cache_need_not_be_written(text, tmp_path, monkeypatch):
    data.prepare(text, "chars", tmp_path / "cache")
    monkeypatch.setattr(data, "locked", None)
    monkeypatch.setattr(data.os, "makedirs", None)
    data.prepare(text, "chars", tmp_path / "cache")


def test_without_locks_each_process_encodes(text, tmp_path, monkeypatch):
    def no_lock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(data.utils.fcntl, "flock", no_lock)
    assert len(data.prepare(text, "chars", tmp_path / "cache").train) > 40_000


def test_a_text_that_changes_while_it_is_encoded(text, tmp_path, capfd, monkeypatch):
    encode_part = data.encode_part

    def change(*arguments):
        yield from encode_part(*arguments)
        with open(text, "a") as file:
            file.write("more")

    monkeypatch.setattr(data, "encode_part", change)
    words = "changed while it was encoded"
    check_fails(capfd, words, data.prepare, text, "chars", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.json"))


def test_too_short(tmp_path, capfd):
    path = write(tmp_path / "text.txt", "0123456789" * 2)
    corpus = data.prepare(path, "chars", tmp_path / "cache")
    assert (len(corpus.train), len(corpus.val)) == (18, 2)
    data.check_length(corpus, 17)
    check_fails(
        capfd, "18 tokens .* block of 18 needs 19", data.check_length, corpus, 18
    )
    corpus.val = corpus.val[:1]
    check_fails(capfd, r"to validate on \(1\)", data.check_length, corpus, 3)
    # One token, one byte, one character: no file can be mapped that is empty.
    corpus = data.prepare(write(tmp_path / "a.txt", "a"), "chars", tmp_path / "cache")
    assert (len(corpus.train), len(corpus.val), corpus.val_bytes) == (1, 0, 0)


# Make batches


def test_blocks():
    blocks = batches.Blocks(np.arange(10, dtype=np.uint16), 4)
    source, targets = blocks[3]
    assert source.tolist() == [3, 4, 5, 6] and targets.tolist() == [4, 5, 6, 7]
    source, targets = blocks[5]
    assert targets.tolist() == [6, 7, 8, 9]
    source, targets = blocks[7]
    assert source.tolist() == [7, 8, 9, 0] and targets.tolist() == [8, 9, -1, -1]
    source, targets = blocks.__getitems__([0, 5, 9])
    assert source.dtype == targets.dtype == torch.int64
    assert source.shape == targets.shape == (3, 4)
    assert source.is_contiguous() and targets.is_contiguous()
    assert source[2].tolist() == [9, 0, 0, 0] and targets[2].tolist() == [-1] * 4
    assert len(blocks) == 9


def test_uint32_tokens_keep_their_numbers():
    source, targets = batches.Blocks(np.array([1, 70_000, 2**31], np.uint32), 2)[0]
    assert source.tolist() == [1, 70_000] and targets.tolist() == [70_000, 2**31]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_predicts_each_token_once(world_size):
    for n_tokens in (2, 17, 64, 65, 66, 100):
        tokens, block_size = np.arange(n_tokens, dtype=np.uint16), 8
        predicted = []
        for rank in range(world_size):
            loader = DataLoader(
                batches.Blocks(tokens, block_size),
                batch_size=3,
                sampler=batches.eval_starts(n_tokens, block_size, 3, rank, world_size),
                collate_fn=batches.take,
            )
            for source, targets in loader:
                assert source.shape == targets.shape == (3, block_size)
                assert torch.equal(targets[targets >= 0], source[targets >= 0] + 1)
                predicted += targets[targets >= 0].tolist()
        assert sorted(predicted) == list(range(1, n_tokens))
    assert batches.eval_starts(65, 32, 1) == [0, 32]  # nothing follows token 64


def test_blocks_go_to_a_worker_by_name(text, tmp_path):
    corpus = data.prepare(text, "chars", tmp_path / "cache")
    sent = pickle.dumps(batches.Blocks(corpus.train, 8))
    assert len(sent) < 1000
    for tokens in (corpus.train, corpus.train[100:300], np.arange(99)):
        blocks = batches.Blocks(tokens, 8)
        again = pickle.loads(pickle.dumps(blocks))
        assert len(again) == len(blocks)
        assert torch.equal(again[5][1], blocks[5][1])


def all_starts(sampler, step, steps):
    sampler.set_step(step)
    stream = iter(sampler)
    return [next(stream) for _ in range(steps * sampler.batch_size)]


@pytest.mark.parametrize("n_tokens", [9, 15, 16, 17, 24, 100, 1001])
def test_a_pass_takes_each_window_once(n_tokens):
    block_size = 8
    sampler = batches.StepSampler(n_tokens, block_size, 1, seed=3)
    shifts, orders = set(), set()
    for number in range(50):
        starts = sampler.starts(number * sampler.windows, sampler.windows)
        shift = min(starts)
        assert sorted(starts) == [shift + block_size * i for i in range(len(starts))]
        # A window has a target after its last token. All that fits is taken.
        assert shift >= 0 and max(starts) + block_size <= n_tokens - 1
        assert n_tokens - len(starts) * block_size <= 2 * block_size
        shifts.add(shift)
        orders.add(tuple(starts - shift))
    if n_tokens > 15:
        assert len(shifts) > 4
    if n_tokens > 99:
        assert len(orders) > 45


def test_each_token_is_trained_on_and_predicted():
    for n_tokens in (9, 16, 21, 23):
        sampler = batches.StepSampler(n_tokens, 8, 1)
        starts = set(sampler.starts(0, 400).tolist())
        assert min(starts) == 0 and max(starts) == n_tokens - 1 - 8


def test_every_size_has_permutations():
    for size in [*range(1, 70), 1000, 1024, 1025]:
        places = np.arange(size)
        order = batches.permute(places, size, np.arange(8, dtype=np.uint64))
        assert sorted(order) == places.tolist()
    # All 24 orders of 4 windows come about equally often.
    sampler = batches.StepSampler(4 * 8 + 8, 8, 4)
    assert sampler.windows == 4
    orders = sampler.starts(0, 4800).reshape(-1, 4)
    orders -= orders.min(1, keepdims=True)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24 and ((counts - 200) ** 2 / 200).sum() < 60


def test_order_is_random():
    sampler = batches.StepSampler(80_000, 8, 1)
    size = sampler.windows
    first, second = sampler.starts(0, 2 * size).reshape(2, -1)
    other = batches.StepSampler(80_000, 8, 1, seed=1).starts(0, size)
    for x, y in ((first[1:], first[:-1]), (first, second), (first, other)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / size**0.5
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 5 / size**0.5


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_takes_the_same_windows_at_every_world_size(world_size):
    arguments = {"n_tokens": 500, "block_size": 8, "seed": 5}
    alone = batches.StepSampler(batch_size=12, **arguments)
    ranks = [
        batches.StepSampler(
            batch_size=12 // world_size, rank=rank, world_size=world_size, **arguments
        )
        for rank in range(world_size)
    ]
    for step in (0, 1, 4, 5, 777):  # 61 windows: a pass ends inside step 5
        whole = alone.starts(step).tolist()
        assert len(whole) == 12
        for rank, sampler in enumerate(ranks):
            assert sampler.starts(step).tolist() == whole[rank::world_size]
    # Four small steps, as for accumulation, take what one large step takes.
    small = batches.StepSampler(batch_size=3, **arguments)
    assert small.starts(20, 4).tolist() == alone.starts(5).tolist()


def test_set_step_goes_on_where_an_uninterrupted_run_is():
    sampler = batches.StepSampler(500, 8, 12, seed=5)
    whole = all_starts(sampler, 0, 300)
    for step in (1, 5, 84, 85, 86, 200):
        assert all_starts(sampler, step, 100) == whole[12 * step :][: 12 * 100]
    again = list(zip(iter(sampler), range(12), strict=False))  # it was not moved
    assert [x for x, _ in again] == whole[12 * 200 :][:12]


def test_a_run_goes_on_at_a_window_with_steps_of_another_size():
    whole = all_starts(batches.StepSampler(500, 8, 12, seed=5), 0, 300)
    for batch_size, windows in ((5, 12), (5, 60), (12, 13), (7, 777)):
        sampler = batches.StepSampler(500, 8, batch_size, seed=5)
        sampler.set_start(windows)
        stream = iter(sampler)
        assert [next(stream) for _ in range(500)] == whole[windows:][:500]
        ranks = [batches.StepSampler(500, 8, batch_size, 5, rank, 2) for rank in (0, 1)]
        for rank, sampler in enumerate(ranks):
            sampler.set_start(windows)
            stream = iter(sampler)
            found = [next(stream) for _ in range(100)]
            assert found == whole[windows + rank :: 2][:100]
        sampler.set_step(3)  # forgets it
        assert next(iter(sampler)) == whole[3 * 2 * batch_size + 1]


def test_a_far_step_of_a_long_text_is_cheap():
    tracemalloc.start()
    sampler = batches.StepSampler(10**13, 64, 8)
    sampler.set_step(10**12)
    first = next(iter(sampler))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 <= first < 10**13 - 64
    assert peak < 1_000_000


def test_the_order_stays_the_same_in_all_versions():
    """A run that was saved under another NumPy resumes with the same windows."""
    sampler = batches.StepSampler(1000, 8, 4, seed=1)
    assert sampler.starts(0, 2).tolist() == GOLDEN[0]
    assert sampler.starts(10**6, 2).tolist() == GOLDEN[1]


GOLDEN = (
    [807, 847, 815, 775, 303, 463, 399, 951],
    [459, 611, 979, 27, 755, 467, 899, 483],
)


def test_a_sampler_needs_a_whole_window():
    with pytest.raises(ValueError, match="8 tokens have no window of 8"):
        batches.StepSampler(8, 8, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader(workers):
    tokens = np.random.default_rng(0).integers(0, 99, 1000).astype(np.uint16)
    blocks, sampler = batches.Blocks(tokens, 8), batches.StepSampler(1000, 8, 5, seed=2)
    sampler.set_step(23)
    loader = DataLoader(
        blocks,
        batch_size=5,
        sampler=sampler,
        collate_fn=batches.take,
        num_workers=workers,
    )
    fetched_ahead = batches.prefetch(loader, torch.device("cpu"))
    for step in range(23, 28):  # a pass has 124 windows: it ends inside step 24
        source, targets = next(fetched_ahead)
        starts = sampler.starts(step)
        assert source.tolist() == [tokens[x : x + 8].tolist() for x in starts]
        assert targets.tolist() == [tokens[x + 1 : x + 9].tolist() for x in starts]


class Batch:
    """A tensor that writes down what happens to it."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def pin_memory(self):
        return Batch(f"pinned {self.name}", self.log)

    def to(self, device, non_blocking=False):
        self.log.append(f"{self.name} to {device.type} {non_blocking}")
        return self.name


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_prefetch_is_one_batch_ahead(device):
    log, fetched = [], []

    def endless():
        for number in range(1000):
            fetched.append(number)
            yield Batch(f"source {number}", log), Batch(f"targets {number}", log)

    fetched_ahead = batches.prefetch(endless(), torch.device(device))
    pinned = "pinned " if device == "cuda" else ""
    for number in range(5):
        expected = f"{pinned}source {number}", f"{pinned}targets {number}"
        assert next(fetched_ahead) == expected
        # The next batch is on its way, and no further one was fetched.
        assert fetched == list(range(number + 2))
        assert log[-1] == f"{pinned}targets {number + 1} to {device} True"
    assert len(log) == 12


def test_prefetch_gives_all_batches_of_a_loader_that_ends():
    for count in (0, 1, 2, 5):
        loader = [(Batch(f"{x}", []), Batch("y", [])) for x in range(count)]
        for device, name in (("mps", str), ("cuda", "pinned {}".format)):
            found = [x for x, _ in batches.prefetch(loader, torch.device(device))]
            assert found == [name(x) for x in range(count)]


def test_prefetch_does_nothing_on_a_cpu():
    fetched = []
    loader = (fetched.append(x) or x for x in range(9))
    fetched_ahead = batches.prefetch(loader, torch.device("cpu"))
    assert [next(fetched_ahead), next(fetched_ahead)] == fetched == [0, 1]


# Encode from the command line


def test_command(text, tmp_path, capfd, monkeypatch):
    cache, sizes = tmp_path / "cache", {}
    for options in ([], ["--tokenizer", "bytes"], ["--val_fraction", "0.5"]):
        argv = ["data.py", text, *options, "--cache", str(cache)]
        monkeypatch.setattr(sys, "argv", argv)
        data.main()
        line = capfd.readouterr().out
        assert line.startswith(f"{text}: ") and line.count("\n") == 1
        sizes[" ".join(options)] = re.findall(r"([\d,]+) to validate|of ([\d,]+)", line)
    assert len(list(cache.glob("*.json"))) == len(set(map(str, sizes.values()))) == 3
    monkeypatch.setattr(sys, "argv", ["data.py", str(tmp_path / "none")])
    check_fails(capfd, "there is no", data.main)
    monkeypatch.setattr(sys, "argv", ["data.py", "--none"])
    check_fails(capfd, "arguments: --none", data.main)


def test_module_imports_only_what_it_needs(tmp_path):
    """In a new interpreter, the command as it is typed; `tokenizers` stays away."""
    check = (
        "import runpy, sys; sys.argv = ['data', '--cache', sys.argv[1]];"
        " runpy.run_module('mingpt.data', run_name='__main__');"
        " sys.exit('tokenizers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, tmp_path / "cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("python-docs: ")
