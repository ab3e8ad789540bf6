"""Draw the picture that goes with a link to the site: `python -m website.preview`.

It needs chromium. The PNG holds a digest of what it was drawn from, so that a test sees
when it is stale without drawing it again: fonts differ from machine to machine.
"""

import hashlib
import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

from ladder.rungs import trunk
from website.home import readme
from website.pictures import cards_of, draw_ladder

FILE = Path(__file__).parent / "static" / "preview.png"
WIDTH, HEIGHT = 1200, 630


def page():
    """The HTML that the picture is taken of: the title and the three steps."""
    title, _, below = readme()[0].partition(": ")
    svg = draw_ladder(cards_of(trunk()), [], {})
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><style>'
        "body{margin:0;padding:36px 60px;font-family:'DejaVu Sans',sans-serif;"
        f"width:{WIDTH - 120}px;height:{HEIGHT - 72}px;background:#fff}}"
        "h1{margin:0;font-size:52px}p{margin:6px 0 18px;font-size:30px;color:#1d4fbf}"
        f"svg{{width:100%;height:auto}}</style><h1>{title}</h1><p>{below}</p>{svg}"
    )


def digest():
    return hashlib.sha256(page().encode()).hexdigest()


def chunks(png):
    """[(kind, data)] of a PNG file."""
    found, at = [], 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def chunk(kind, data):
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def main():
    with tempfile.TemporaryDirectory() as folder:
        source, shot = Path(folder, "page.html"), Path(folder, "shot.png")
        source.write_text(page())
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--screenshot={shot}", f"--window-size={WIDTH},{HEIGHT}"]
        command = [shutil.which("chromium"), *options, source.as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        head, *rest = chunks(shot.read_bytes())
    note = b"tEXt", b"Source\0" + digest().encode()
    parts = b"".join(chunk(*x) for x in [head, note, *rest])
    FILE.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


if __name__ == "__main__":
    main()
