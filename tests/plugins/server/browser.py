"""A headless Chromium, spoken to over two pipes. It knows no page."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; a context manager. Keys go to whatever has the focus, as a person's would."""

    def __init__(self, width=1280, height=900):
        self._numbers = itertools.count(1)
        self._held = b""
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        out_read, self._out = os.pipe()
        self._in, in_write = os.pipe()
        options = ["--headless=new", "--disable-gpu", "--no-first-run", "--no-sandbox", "--disable-dev-shm-usage"]
        options += ["--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={self._home.name}"]
        # The pipes must be descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{out_read} 4>&{in_write}'
        command = ["/bin/bash", "-c", script, find(), "--remote-debugging-pipe", *options, "about:blank"]
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(out_read, in_write), env=environment, **quiet)
        os.close(out_read)
        os.close(in_write)
        target = next(t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def _send(self, method, session=None, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._held:
            read = os.read(self._in, 1 << 16)
            if not read:
                msg = "the browser has ended"
                raise RuntimeError(msg)
            self._held += read
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def call(self, method, **params):
        """Call a method of the page's protocol."""
        return self._send(method, self._session, **params)

    def open(self, url):
        """Go to ``url`` and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression):
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, expression, seconds=30):
        """Wait until an expression is true and return its value."""
        ends = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > ends:
                msg = f"not true within {seconds} s: {expression}\n{self.evaluate('document.body.innerText')}"
                raise AssertionError(msg)
            time.sleep(0.03)
        return value

    def type(self, text):
        """Type text."""
        self.call("Input.insertText", text=text)

    def press(self, key, code=0):
        """Press a key by its name: Enter, Tab."""
        code = code or {"Enter": 13, "Tab": 9}[key]
        text = {"Enter": "\r"}.get(key, "")
        whole = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **whole)
        self.call("Input.dispatchKeyEvent", type="keyUp", **whole)

    def resize(self, width, height, scale=1):
        """Set the size of the window in CSS pixels."""
        fixed = {"deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **fixed)

    def prefer(self, scheme):
        """Prefer a light or a dark page."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self):
        """Return the window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
