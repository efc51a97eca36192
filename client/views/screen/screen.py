"""The screen: draws views on a separate thread, and handles keys.

A terminal that accepts no output (Ctrl-S, a hung connection) blocks only the screen's thread, never
the supervision. If drawing fails, plain lines replace the screen.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from rich.text import Text

from penstock.client.views.console import Console
from penstock.client.views.display import Display, Plain, describe
from penstock.client.views.output import behind
from penstock.client.views.run_view import RunView
from penstock.client.views.screen.commands import Commands
from penstock.client.views.screen.events import RunEvent, Tone, texts_of
from penstock.client.views.screen.layout import compose
from penstock.client.views.screen.model import Facts, Model
from penstock.client.views.screen.panels import ASCII, UNICODE, joined
from penstock.client.views.screen.terminal import Terminal, speaks_unicode, usable
from penstock.protocol.wire.control import ControlClient

MESSAGE_S = 8.0
"""Seconds to show an answer."""
LAST_EVENTS = 12
"""Number of events to print after the screen is closed."""
NICENESS = 19
"""Niceness of the drawing thread: the lowest priority."""
END_TIMEOUT_S = 1.0
FOREGROUND_S = 1.0
"""Seconds between two checks whether a background process is in the foreground again."""

_log = logging.getLogger(__name__)


class Screen:
    """A :class:`~penstock.client.views.display.Display` that uses the whole terminal from the first
    view on. One thread must construct it and call all methods.
    """

    wants_past = True

    def __init__(self, facts: Facts, commands: Commands, console: Console) -> None:
        self._model = Model(facts)
        self._console = console
        self._glyphs = UNICODE if speaks_unicode() else ASCII
        self._commands = commands
        self._commands.tell = self._tell
        self._read, self._written = os.pipe()
        os.set_blocking(self._written, False)  # a hung screen must block no other thread
        self._terminal = Terminal(sys.stdout.fileno(), self._wake)
        self._stack = ExitStack()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._left = threading.Event()
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._page = ""
        self._asking = False
        self._message = ("", 0.0)
        self._views: queue.SimpleQueue[tuple[RunView | str, float]] = queue.SimpleQueue()
        self._plain: Plain | None = None

    # ---- display ----

    @property
    def stream(self) -> IO[str]:
        """The stream of lines before the first view."""
        return self._console.file

    def say(self, message: str) -> None:
        """Shows a line as an event on the screen; without the screen, prints the line."""
        if self._plain is not None:
            self._plain.say(message)
            return
        if self._thread is None or self._closing:
            self._console.print(message, markup=False, highlight=False)
            return
        self._views.put((message, time.time()))
        self._wake()

    def show(self, view: RunView) -> None:
        """Draws the current state of the run."""
        if self._plain is not None:
            self._plain.show(view)
            return
        self._views.put((view, time.time()))
        if self._thread is None:
            self._stack.enter_context(self._terminal.signals())
            self._stack.callback(self._terminal.give_back)
            self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
            self._thread.start()
        self._wake()

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds``, or until the user leaves."""
        return self._left.wait(seconds)

    def close(self) -> None:
        """Restores the terminal and prints the last events; further calls do nothing."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
        self._stack.close()
        self._commands.close()
        started = self._thread is not None
        if self._thread is None or not self._thread.is_alive():
            for descriptor in (self._read, self._written):
                with suppress(OSError):
                    os.close(descriptor)
        if self._plain is not None:
            self._plain.close()
        elif started:
            self._drain()
            self._print_last()

    def _print_last(self) -> None:
        events = list(self._model.events)[-LAST_EVENTS:]
        for event, words in zip(events, texts_of(events), strict=True):
            if event.at_s is not None:
                when = time.strftime("%H:%M:%S", time.localtime(event.at_s))
                self._console.print(f"{when}  {words}", markup=False, highlight=False)
        if self._model.last is not None:
            line = describe(self._model.last, None)
            self._console.print(line, markup=False, highlight=False)

    # ---- the screen's thread ----

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            while not self._closing:
                self._drain()
                self._terminal.take()
                if self._terminal.lent:
                    self._draw()
                self._listen()
        except OSError as error:
            _log.info("the terminal is gone: %s", error)
        except Exception:
            _log.exception("the screen cannot be drawn: plain lines from here on")
            self._terminal.give_back()
            self._plain = Plain(self._console.file)

    def _drain(self) -> None:
        """Adds queued views and messages to the model."""
        while not self._views.empty():
            item, now_s = self._views.get()
            if isinstance(item, RunView):
                self._model.take(item, now_s)
                continue
            step = self._model.status.version
            self._model.events.add(RunEvent(at_s=now_s, step=step, text=item, tone=Tone.NOTE))

    def _draw(self) -> None:
        """Writes the changed lines."""
        width, height = self._terminal.size
        lines = compose(self._model, self._glyphs, width, height, self._footer(), self._page)
        rows = rendered(lines, self._console, width)
        resized = self._terminal.resumed or (width, height) != self._size
        if resized:
            self._terminal.resumed, self._size = False, (width, height)
        output = changes(rows, None if resized else self._drawn)
        if output:
            self._terminal.write(output.encode(self._console.encoding, "replace"))
        self._drawn = rows

    def _footer(self) -> Text:
        """Returns the last line: a question, an answer, or the keys."""
        if self._asking:
            return joined(
                ("stop the run? ", "bold yellow"),
                "the step ends, the state is saved, the same command resumes.  ",
                ("y", "bold"),
                " yes, other keys: no",
            )
        words, until_s = self._message
        if words and time.monotonic() < until_s:
            return joined((words, "bold cyan"))
        return keys_line(self._model)

    def _listen(self) -> None:
        """Waits for keys, for a view, or until the answer disappears."""
        watched = [self._read, 0] if self._terminal.lent else [self._read]
        ready, _, _ = select.select(watched, [], [], self._patience_s())
        if self._read in ready:
            os.read(self._read, 4096)
        if 0 in ready:
            for key in self._terminal.keys():
                self._press(key)

    def _patience_s(self) -> float | None:
        if not self._terminal.lent:
            return FOREGROUND_S
        left_s = self._message[1] - time.monotonic()
        return left_s if self._message[0] and left_s > 0 else None

    def _press(self, key: str) -> None:
        if self._asking:
            self._asking = False
            if key in "yY":
                self._stop()
        elif self._page:
            self._page = ""
        else:
            action = self._ACTIONS.get(key.lower())
            if action is not None:
                action(self)

    def _toggle_pause(self) -> None:
        paused = self._model.status.pausing or self._model.phase == "paused"
        self._commands.ask("resume" if paused else "pause")

    def _save(self) -> None:
        self._commands.ask("save")

    def _show_help(self) -> None:
        self._page = "help"

    def _show_events(self) -> None:
        self._page = "events"

    def _quit(self) -> None:
        if self._model.facts.leaves:
            self._left.set()
        else:
            self._asking = True

    def _stop(self) -> None:
        """Requests a clean stop, like Ctrl-C."""
        os.kill(os.getpid(), signal.SIGINT)

    def _tell(self, words: str) -> None:
        self._message = (words, time.monotonic() + MESSAGE_S)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._written, b"\0")

    _ACTIONS = {  # noqa: RUF012  # methods, by key
        "p": _toggle_pause,
        "s": _save,
        "h": _show_help,
        "?": _show_help,
        "e": _show_events,
        "q": _quit,
    }


def keys_line(model: Model) -> Text:
    """Returns the line of keys and their actions."""
    paused = model.status.pausing or model.phase == "paused"
    keys = [
        ("p", "continue" if paused else "pause"),
        ("s", "save now"),
        ("e", "events"),
        ("h", "help"),
        ("q", "leave" if model.facts.leaves else "stop"),
    ]
    parts: list[tuple[str, str] | str] = []
    for key, words in keys:
        parts += [(f" {key} ", "reverse"), f" {words}  "]
    return joined(*parts)


def changes(rows: Sequence[str], drawn: Sequence[str] | None) -> str:
    """Returns the output that replaces the rows ``drawn`` by ``rows``. None clears the terminal.

    Rows fill the terminal's width. An erase after a full row would delete its last column, where
    the cursor of xterm and tmux stays.
    """
    before = [""] * len(rows) if drawn is None else drawn
    changed = [
        f"\x1b[{number};1H{row}"
        for number, (row, old) in enumerate(zip(rows, before, strict=True), start=1)
        if row != old
    ]
    return "".join(["\x1b[0m\x1b[2J"] * (drawn is None) + changed)


def rendered(lines: list[Text], console: Console, width: int) -> list[str]:
    """Returns each line with the console's escape sequences for colours."""
    with console.capture() as capture:
        for line in lines:
            console.print(line, end="\n", soft_wrap=True, width=width, highlight=False)
    return capture.get().split("\n")[: len(lines)]


def choose_display(
    facts: Facts, connect: Callable[[], ControlClient], console: Console | None = None
) -> Display:
    """Returns a screen if this process can use its terminal, otherwise plain lines."""
    console = Console() if console is None else console
    if console.is_terminal and console.file is behind(sys.stdout) and usable():
        return Screen(facts, Commands(connect), console)
    return Plain(console.file)
