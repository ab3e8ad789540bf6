"""What is proven already: the lines of tools/prove/green.txt.

A line has the kind of a proof, what is proven, how, and a hash of all that the proof
depends on, with tabs in between. No line depends on another, so that git can take the
lines of both sides where two changes meet (.gitattributes). A line whose hash is no
longer right is ignored.

    python -m tools.prove.record    delete all but the lines of mutants
"""

import fcntl
import hashlib
from pathlib import Path
from typing import NamedTuple

GREEN = Path(__file__).with_name("green.txt")


class Proof(NamedTuple):
    kind: str  # the edge of a mutant "PARENT CHILD", or the file of a test or a command
    what: str
    by: str  # the test that kills a mutant, or the versions that something passed with
    digest: str


def digest(parts):
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def read():
    """All proofs that are written down."""
    return {Proof(*line.split("\t")) for line in GREEN.read_text().splitlines()}


def change(add=(), drop=()):
    """Write proofs down, and forget others. Several processes may do so at once."""
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        proofs = read().difference(drop).union(add)
        temporary = GREEN.with_name(".green.tmp")  # which nobody copies meanwhile
        lines = ["\t".join(proof) for proof in sorted(proofs)]
        temporary.write_text("\n".join(lines) + "\n")
        temporary.rename(GREEN)  # whole, also if this is interrupted


if __name__ == "__main__":
    change(drop=[proof for proof in read() if "::" not in proof.by])
