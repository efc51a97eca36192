"""The preparation of one long text, or of conversations: memory and speed beside the library's own
``encode_batch``.

    python -m bench.preparing [--megabytes 100 200] [--tokenizer TOKENIZER.json] [--one-line]
                              [--messages] [--folder DIR] [--json]

The text is Python's own library, again and again, in one ``.txt`` file; with ``--one-line`` spaces
stand in place of line ends. With ``--messages`` it is JSON lines of ``messages``, of log-normal
lengths. The tokenizer is a file, ``byte``, or a byte-level BPE with Llama 3's expression and 8,000
tokens, trained on the same text. Each measurement is a process of its own:

* ``pieces`` writes the token file as a preparation does;
* ``rows`` writes the file of rows of conversations: reads, renders by ``chatml``, encodes, packs;
* ``bare`` calls ``encode_batch`` for 128 texts of 128 KiB at a time, or for half a
  million characters of rendered conversations, and drops the ids: all cores.

``anonymous`` is the highest ``RssAnon`` of the process, read every 20 ms. ``ratio`` is the speed of
``pieces`` or ``rows`` over that of ``bare``; ``CPU ratio`` is the same with the time of all cores
in place of the clock's, and counts on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from math import log
from multiprocessing import get_context
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from penstock.config.schema import parse_config
from penstock.config.values import BYTE
from penstock.models.data.chat.conversation import request_of
from penstock.models.data.chat.encoder import Encoder
from penstock.models.data.chat.masks import Choices, Draft, drafts_of
from penstock.models.data.chat.templates import CHATML, chosen_template
from penstock.models.data.chunks import ChunkHasher
from penstock.models.data.corpus import write_tokens
from penstock.models.data.marks import Marks
from penstock.models.data.reading.records import documents, records
from penstock.models.data.rows.sources import open_sources
from penstock.models.data.sources import STDLIB, find_source
from penstock.models.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer
from penstock.models.prepare import prepare

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
TEXT_CHARACTERS = 1 << 17
TEXTS_AT_ONCE = 16
CONVERSATIONS_CHARACTERS = 1 << 19
MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
Work = Callable[[], int]
"""Measured work, which returns its number of tokens."""


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
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def write_messages(path: Path, megabytes: int) -> None:
    """Writes conversations of the library's text, with a median of about 1,400 characters."""
    random, size = Random(35), 0
    content = "".join(file.read_text(errors="replace") for file in find_source(STDLIB).files[:200])
    with path.open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            left, turns = min(20_000, int(random.lognormvariate(log(1400), 0.9))), []
            while left > 0 or len(turns) % 2:
                start, count = random.randrange(len(content)), random.randint(60, 1200)
                role = ("user", "assistant")[len(turns) % 2]
                turns.append({"role": role, "content": content[start : start + count]})
                left -= count
            size += file.write(json.dumps({"messages": turns}) + "\n")


def pieces(text: Path, tokenizer: Path) -> Work:
    """Returns the writing of the token file of a text."""
    opened, source = JsonTokenizer(tokenizer), find_source(str(text))

    def work() -> int:
        out, marks = text.with_suffix(".bin"), Marks(after=(0,))
        count = write_tokens(
            documents(source), opened, out, ChunkHasher(), marks, vocab_size=opened.vocab_size
        )
        out.unlink()
        return count

    return work


def rows(text: Path, tokenizer: Path) -> Work:
    """Returns the writing of the rows of conversations."""
    config = parse_config(
        {
            "model": {"hf": MODEL},
            "data": {
                "path": str(text),
                "tokenizer": str(tokenizer),
                "chat_template": "chatml",
                "sequence_length": 4096,
                "cache_limit": 0,
            },
        }
    )
    folder = text.with_name("run")
    prepare(config, folder, table_only=True)
    sources = open_sources(config, open_tokenizer(config), None, folder, lambda message: None)

    def work() -> int:
        made = sources.write(folder)
        shutil.rmtree(folder)
        return int(made["train"]["num_tokens"])

    return work


def bare(text: Path, tokenizer: Path) -> Work:
    """Returns the encoding of a text in short ones."""
    opened = Tokenizer.from_file(str(tokenizer))

    def work() -> int:
        count = 0
        with text.open(encoding="utf-8", newline="") as file:
            while texts := [
                part for _ in range(TEXTS_AT_ONCE) if (part := file.read(TEXT_CHARACTERS))
            ]:
                encodings = opened.encode_batch(texts, add_special_tokens=False)
                count += sum(len(encoding.ids) for encoding in encodings)
        return count

    return work


def bare_rows(text: Path, tokenizer: Path) -> Work:
    """Returns the encoding of conversations that were rendered before, one after another in a
    file.
    """
    parts = ByteTokenizer().chat_parts()
    opened = parts.library if str(tokenizer) == BYTE else Tokenizer.from_file(str(tokenizer))
    template = chosen_template(CHATML, None, parts.special)
    rendered = text.with_suffix(".rendered")
    with rendered.open("w", encoding="utf-8") as file:
        for record in records(find_source(str(text), any_records=True)):
            request = request_of(record.place, record.fields)
            (draft,) = drafts_of(request, Encoder(parts.library), template, Choices())
            assert isinstance(draft, Draft)
            file.write(draft.passage.text.replace("\0", "") + "\0")

    def work() -> int:
        count, rest = 0, ""
        with rendered.open(encoding="utf-8", newline="") as file:
            while part := file.read(CONVERSATIONS_CHARACTERS):
                *texts, rest = (rest + part).split("\0")
                encodings = opened.encode_batch(texts, add_special_tokens=False)
                count += sum(len(encoding.ids) for encoding in encodings)
        rendered.unlink()
        return count

    return work


def measured(
    prepared: Callable[[Path, Path], Work], text: Path, tokenizer: Path
) -> dict[str, float]:
    """Returns seconds, tokens, and the highest anonymous memory of this process meanwhile."""
    work = prepared(text, tokenizer)
    peak, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    try:
        tokens = work()
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
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = []
    ours, theirs = (rows, bare_rows) if options.messages else (pieces, bare)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        tokenizer = options.tokenizer or Path(name, "tokenizer.json")
        if options.tokenizer is None:
            train_tokenizer(tokenizer)
        for megabytes in options.megabytes:
            text = Path(name, "text.jsonl" if options.messages else "text.txt")
            if options.messages:
                write_messages(text, megabytes)
            else:
                write_text(text, megabytes, one_line=options.one_line)
            row: dict[str, float] = {"megabytes": megabytes}
            for key, work in (("bare", theirs), ("ours", ours)):
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    result = process.submit(measured, work, text, tokenizer).result()
                row |= {f"{key}_{field}": value for field, value in result.items()}
            row["ratio"] = row["bare_seconds"] / row["ours_seconds"]
            row["cpu_ratio"] = row["bare_cpu_seconds"] / row["ours_cpu_seconds"]
            lines.append(row)
            if not options.json:
                print(
                    f"{megabytes:>6} MB  bare {megabytes / row['bare_seconds']:5.1f} MB/s"
                    f"  {ours.__name__} {megabytes / row['ours_seconds']:5.1f} MB/s"
                    f"  ratio {row['ratio']:.2f}, CPU ratio {row['cpu_ratio']:.2f}"
                    f"  anonymous {row['ours_anonymous'] / 2**20:,.0f} MiB"
                    f" (bare {row['bare_anonymous'] / 2**20:,.0f})",
                    flush=True,
                )
    if options.json:
        print(json.dumps(lines, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
