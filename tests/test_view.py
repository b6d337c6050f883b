from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tianji.verdict import Verdict
from tianji.view.status import SilentView, Staleness, Status, duration, human, number
from tianji.view.terminal import LiveView, PlainView, choose_view, live_panel, sparkline

STATUS = Status(
    elapsed=83.0,
    steps=120_000,
    updates=1880,
    episodes=1230,
    produced=12_300.0,
    received=12_100.0,
    consumed=48_400.0,
    fraction=0.66,
    goals=("steps 120 k of 500 k", "return 312.4 of 475"),
    return_mean=312.4,
    return_best=330.1,
    length_mean=312.0,
    staleness=Staleness(1.2, 3.0, 7),
    util={"learner/update": 0.78, "actor/simulate": 0.12, "actor/infer": 0.08, "run/other": 0.02},
    curve=tuple((float(x), float(x) ** 0.5) for x in range(200)),
)
SPREAD = replace(
    STATUS,
    util={
        "learner/update": 0.78,
        "learner/wait_buffer": 0.22,
        "actor/simulate": 0.52,
        "actor/infer": 0.31,
        "actor/wait_buffer": 0.17,
        "buffer/serve": 0.11,
        "buffer/wait_actor": 0.89,
        "evaluator/simulate": 0.4,
        "evaluator/idle": 0.6,
        "driver/turn": 0.01,
    },
    verdict=Verdict(
        "train-bound", "learner 96 % busy; actors blocked 41 % on learner",
        ("2 fewer actors cost nothing", "1 more learner core = +38 %"),
    ),
)  # fmt: skip
EMPTY = Status(
    elapsed=0.0, steps=0, updates=0, episodes=0, produced=0.0, received=0.0, consumed=0.0
)


def drawn(status: Status, width: int) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    events = ["checkpoint saved at 110 k steps", "x" * 300]
    with console.capture() as captured:
        console.print(live_panel("tianji · ppo · CartPole-v1", status, events, width, color=True))
    return captured.get().splitlines()


class Tty(io.StringIO):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def test_the_live_view_is_for_terminals_that_can_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(choose_view(Tty(), plain=False), LiveView)
    assert isinstance(choose_view(Tty(), plain=True), PlainView)
    assert isinstance(choose_view(Tty("ascii"), plain=False), PlainView)
    assert isinstance(choose_view(io.StringIO(), plain=False), PlainView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_view(Tty(), plain=False), PlainView)
    monkeypatch.delenv("TERM")
    assert isinstance(choose_view(Tty(), plain=False), PlainView)


def test_the_plain_view_has_no_control_characters() -> None:
    stream = io.StringIO()
    with PlainView(stream) as view:
        view.begin("tianji \x1b[31mred", {"folder": "runs/\x07bell"})
        view.show(EMPTY)
        view.show(STATUS)
        view.line("env said \x1b]0;title\x07 and\r more")
        view.end(["stopped: steps >= 500000"])
        view.end(["never shown"])
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert lines[0] == r"tianji \x1b[31mred"
    assert lines[3] == (
        "1:23 | 66 % | return 312.4 (best 330.1) | length 312.0 | episodes 1.2 k | steps 120 k | "
        "updates 1.9 k | steps/s 12.3 k produced, 12.1 k received, 48.4 k consumed | "
        "staleness 1.2 mean, 3 p95, 7 max"
    )
    assert lines[-1] == "stopped: steps >= 500000"


def test_the_plain_view_writes_to_streams_that_lack_characters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = PlainView(stream)
    view.begin("天机 · ppo", {})
    view.end()
    assert raw.getvalue() == b"\\u5929\\u673a \\xb7 ppo\n"


def test_a_plain_view_whose_stream_is_full_neither_stops_the_run_nor_changes_its_exit_code() -> (
    None
):
    code = (
        "import sys; from tianji.view.terminal import PlainView\n"
        "with PlainView(sys.stdout) as view:\n"
        "    view.line('x' * 10000); view.line('y')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_silent_view_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with SilentView() as view:
        view.begin("title", {"fact": 1})
        view.show(STATUS)
        view.line("line")
        view.end(["result"])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
@pytest.mark.parametrize("status", [STATUS, SPREAD, EMPTY], ids=["serial", "spread", "empty"])
def test_the_panel_fits_in_14_lines_of_any_width(width: int, status: Status) -> None:
    from rich.cells import cell_len

    lines = drawn(status, width)
    assert len(lines) <= 14
    assert {cell_len(line) for line in lines} == {width}


def test_the_panel_shows_all_that_matters_in_80_columns() -> None:
    text = "\n".join(drawn(STATUS, 80))
    for words in (
        "tianji · ppo · CartPole-v1",
        "66 %",
        "steps 120 k of 500 k · return 312.4 of 475",
        "312.4  best 330.1",
        "length 312.0",
        "12.3 k produced → 12.1 k received → 48.4 k consumed  ×4",
        "1.2 mean   3 p95   7 max",
        "learner update 78 % · actor simulate 12 % · actor infer 8 %",
        "checkpoint saved at 110 k steps",
        "1:23",
    ):
        assert words in text
    assert re.search("[▁▂▃▄▅▆▇█]{20,} 0 to 14.1", text)


def test_roles_on_hosts_of_their_own_have_a_bar_each() -> None:
    lines = drawn(SPREAD, 80)
    learner = next(line for line in lines if line.startswith("│ learner"))
    assert "█" * 16 + "░" * 4 + "  update 78 % · wait buffer 22 %" in learner
    assert any("serve 11 % · wait actor 89 %" in line for line in lines)
    assert not any("driver" in line for line in lines)


def test_the_verdict_is_shown_with_its_evidence_and_its_advice() -> None:
    lines = drawn(SPREAD, 80)
    told = "bound     train-bound: learner 96 % busy; actors blocked 41 % on learner"
    at = next(i for i, line in enumerate(lines) if told in line)
    assert "2 fewer actors cost nothing; 1 more learner core = +38 %" in lines[at + 1]
    assert any("x" * 60 in line for line in lines), "the last event is shown all the same"
    stream = io.StringIO()
    PlainView(stream).show(SPREAD)
    assert SPREAD.verdict is not None
    assert stream.getvalue().rstrip().endswith(SPREAD.verdict.line)


def test_a_sparkline_spans_its_range_over_steps() -> None:
    assert sparkline([(0, 0.0), (1, 1.0), (2, 2.0), (3, 7.0)], 4) == "▁▂▃█"
    assert sparkline([(0, 0.0), (90, 7.0), (100, 7.0)], 10) == "▁▁▁▁▁▁▁▁▁█"
    assert sparkline([(5, 3.0)], 3) == "▁▁▁"
    assert sparkline([], 3) == sparkline([(0, 1.0)], 0) == ""


def test_numbers_are_human() -> None:
    counts = [0, 7, 312, 999, 1000, 12_345, 99_960, 123_456, 999_500, 1_234_567, 4e15]
    assert [human(count) for count in counts] == (
        ["0", "7", "312", "999", "1.0 k", "12.3 k", "100 k", "123 k", "1.0 M", "1.2 M", "4000 T"]
    )
    assert human(-12_345) == "-12.3 k"
    assert [number(x) for x in (312.44, -0.01234, 475.0, 1234.0, -123_456.0)] == (
        ["312.4", "-0.01234", "475.0", "1234", "-123 k"]
    )
    assert [duration(s) for s in (0, 42.9, 723, 3723)] == ["0:00", "0:42", "12:03", "1:02:03"]


RUN = """
import sys, time
from tianji.view.status import Status
from tianji.view.terminal import choose_view
status = Status(1.0, 120_000, 1880, 1230, 1.0, 2.0, 3.0, 0.5, ("steps 1 of 2",))
view = choose_view(sys.stdout, plain=False)
assert type(view).__name__ == "LiveView"
def run():
    view.begin("title", {"folder": "runs/1"})
    view.show(status)
    view.line("checkpoint saved")
    print("READY")
"""
ENDINGS = {
    "well": ("with view:\n    run()\n    view.end(['stopped: steps >= 2'])", 0),
    "by an exception": ("with view:\n    run()\n    raise RuntimeError('boom')", 1),
    # short sleeps: a signal that comes just before a long one is only seen at its end
    "by Ctrl-C": ("with view:\n    run()\n    while True: time.sleep(0.01)", -signal.SIGINT),
    "without end": ("run()\nraise RuntimeError('boom')", 1),
}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def in_a_terminal(code: str, interrupt: bool, **env: str) -> tuple[str, int]:
    """What the program writes to a terminal of 80 columns, and its exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=inherited | {"TERM": "xterm-256color", "PYTHONUTF8": "1"} | env,
    )
    os.close(theirs)
    text, deadline = b"", time.monotonic() + 60
    try:
        while select.select([ours], [], [], 0.5)[0] or process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {text.decode()!r}"
            if not select.select([ours], [], [], 0)[0]:
                continue
            try:
                text += os.read(ours, 65536)
            except OSError:  # EIO: the last writer has closed
                break
            if interrupt and b"READY" in text:
                interrupt = False
                process.send_signal(signal.SIGINT)
        return text.decode(), process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_terminal_is_whole_when_the_run_ends(ending: str) -> None:
    last, exit_code = ENDINGS[ending]
    text, code = in_a_terminal(RUN + last, interrupt=ending == "by Ctrl-C")
    assert code == exit_code
    assert HIDE in text
    assert text.rindex(SHOW) > text.rindex(HIDE)
    assert "\x1b[?1049h" not in text
    assert "checkpoint saved" in text
    assert "steps 1 of 2" in text
    if ending == "well":
        assert text.rindex("stopped: steps >= 2") > text.rindex("╯")
    if exit_code == 1:
        assert "RuntimeError" in text


def test_no_color_is_honoured() -> None:
    colored, _ = in_a_terminal(RUN + ENDINGS["well"][0], interrupt=False)
    plain, _ = in_a_terminal(RUN + ENDINGS["well"][0], interrupt=False, NO_COLOR="1")
    color = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    assert color.search(colored)
    assert not color.search(plain)


def test_a_narrower_terminal_is_drawn_anew() -> None:
    code = RUN + (
        "import fcntl, struct, termios\n"
        "with view:\n    run()\n"
        "    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 50, 0, 0))\n"
        "    view.show(status)\n"
    )
    text, exit_code = in_a_terminal(code, interrupt=False)
    assert exit_code == 0
    after = text[text.index("\x1b[2J") :]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", after)
    widths = {len(line) for line in re.split(r"[\r\n]+", plain) if line.startswith(("╭", "│", "╰"))}
    assert widths == {50}
    assert "runs/1" in plain
