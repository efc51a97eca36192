"""The preparation of one long text: memory and speed beside the library's own ``encode_batch``.

    python -m bench.preparing [--megabytes 100 200] [--tokenizer TOKENIZER.json] [--one-line]
                              [--folder DIR] [--json]

The text is Python's own library, again and again, in one ``.txt`` file; with ``--one-line`` spaces
stand in place of line ends. The tokenizer is a file, or a byte-level BPE with Llama 3's expression
and 8,000 tokens, trained on the same text. Each measurement is a process of its own:

* ``pieces`` writes the token file as a preparation does;
* ``bare`` calls ``encode_batch`` for 128 texts of 128 KiB at a time, and drops the ids: all cores,
  with other tokens at the ends of texts.

``anonymous`` is the highest ``RssAnon`` of the process, read every 20 ms. ``ratio`` is the speed of
``pieces`` over that of ``bare``; ``CPU ratio`` is the same with the time of all cores in place of
the clock's, and counts on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.corpus import write_tokens
from penstock.models.data.marks import Marks
from penstock.models.data.reading.records import documents
from penstock.models.data.sources import STDLIB, find_source
from penstock.models.data.tokenizer import JsonTokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
TEXT_CHARACTERS = 1 << 17
TEXTS_AT_ONCE = 16


def write_text(path: Path, megabytes: int, *, one_line: bool) -> None:
    """Writes the library's text until the file has so many megabytes."""
    files = [file.read_bytes() for file in find_source(STDLIB).files]
    content = b"".join(files)
    content = content.replace(b"\n", b" ") if one_line else content
    with path.open("wb") as file:
        left = megabytes * 10**6
        while left > 0:
            # Ends of parts are ASCII, so no character is cut.
            file.write(
                content if left >= len(content) else content[:left].decode(errors="ignore").encode()
            )
            left -= len(content)


def train_tokenizer(path: Path) -> None:
    """Writes a byte-level BPE that was trained on a part of the library's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [file.read_text(errors="replace") for file in sorted(root.glob("*.py"))]
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=[END], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def pieces(text: Path, tokenizer: Path) -> int:
    """Writes the token file of a text; returns its number of tokens."""
    out = text.with_suffix(".bin")
    source = find_source(str(text))
    opened = JsonTokenizer(tokenizer)
    marks = Marks(after=(0,))
    count = write_tokens(
        documents(source), opened, out, ChunkHasher(), marks, vocab_size=opened.vocab_size
    )
    out.unlink()
    return count


def bare(text: Path, tokenizer: Path) -> int:
    """Encodes a text in short ones; returns the number of tokens."""
    opened = Tokenizer.from_file(str(tokenizer))
    count = 0
    with text.open(encoding="utf-8", newline="") as file:
        while texts := [part for _ in range(TEXTS_AT_ONCE) if (part := file.read(TEXT_CHARACTERS))]:
            encodings = opened.encode_batch(texts, add_special_tokens=False)
            count += sum(len(encoding.ids) for encoding in encodings)
    return count


def measured(work: Callable[[Path, Path], int], text: Path, tokenizer: Path) -> dict[str, float]:
    """Returns seconds, tokens, and the highest anonymous memory of this process meanwhile."""
    peak, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        tokens = work(text, tokenizer)
    finally:
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        done.set()
        watcher.join()
    return {"seconds": seconds, "cpu_seconds": cpu_s, "tokens": tokens, "anonymous": peak[0]}


def anonymous_bytes() -> int:
    """Returns the anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 200])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--one-line", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        tokenizer = options.tokenizer or Path(name, "tokenizer.json")
        if options.tokenizer is None:
            train_tokenizer(tokenizer)
        for megabytes in options.megabytes:
            text = Path(name, "text.txt")
            write_text(text, megabytes, one_line=options.one_line)
            row: dict[str, float] = {"megabytes": megabytes}
            for work in (bare, pieces):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    result = process.submit(measured, work, text, tokenizer).result()
                row |= {f"{work.__name__}_{key}": value for key, value in result.items()}
            row["ratio"] = row["bare_seconds"] / row["pieces_seconds"]
            row["cpu_ratio"] = row["bare_cpu_seconds"] / row["pieces_cpu_seconds"]
            rows.append(row)
            if not options.json:
                print(
                    f"{megabytes:>6} MB  bare {megabytes / row['bare_seconds']:5.1f} MB/s"
                    f"  pieces {megabytes / row['pieces_seconds']:5.1f} MB/s"
                    f"  ratio {row['ratio']:.2f}, CPU ratio {row['cpu_ratio']:.2f}"
                    f"  anonymous {row['pieces_anonymous'] / 2**20:,.0f} MiB"
                    f" (bare {row['bare_anonymous'] / 2**20:,.0f})",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
