"""A real browser for tests: headless Chromium, spoken to over its DevTools pipe."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ABSENT = "no chromium here: install Debian's package chromium to test pages"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
ANSWER = 60.0
"""seconds in which the browser must answer"""


class Browser:
    """One window. What a page's scripts raise or log as an error is in `errors`."""

    def __init__(self, width=1200, height=800):
        self._folder = tempfile.mkdtemp(prefix="browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        ours = [os.dup(fd) if fd < 10 else fd for fd in (to_read, to_write)]

        def place():
            high = [os.dup2(fd, 60 + i) for i, fd in enumerate(ours)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=place,
            start_new_session=True,
        )
        for fd in {to_read, to_write, *ours}:
            os.close(fd)
        self._buffer, self._sent, self._session = b"", 0, None
        self.errors = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, method, **params):
        """Send a command; its answer."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + ANSWER
        while True:
            answer = self._next(end)
            if answer.get("id") == self._sent:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self, end):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 2**20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])

    def size(self, width, height, scale=1, mobile=False):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=mobile,
        )  # fmt: skip

    def dark(self, on=True):
        value = "dark" if on else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def open(self, address):
        self.errors.clear()
        self.ask("Page.navigate", url=address)
        self.until(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def js(self, expression):
        """The value of an expression in the page; a promise is awaited."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression):
        """Wait until it is true of the page, and until what it draws is drawn."""
        end = time.monotonic() + ANSWER
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < end, f"{expression} did not become true: {self.errors}"
            time.sleep(0.02)
        self.drawn()

    def drawn(self):
        self.js("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r(1))))")

    def mouse(self, kind, x, y, **more):
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.drawn()

    def press_key(self, key, shift=False):
        modifiers = 8 if shift else 0
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **more)
        self.drawn()

    def touch(self, kind, *points):
        self.ask(
            "Input.dispatchTouchEvent", type=kind,
            touchPoints=[{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)],
        )  # fmt: skip
        self.drawn()

    def picture(self, path):
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        Path(path).write_bytes(base64.b64decode(data))
