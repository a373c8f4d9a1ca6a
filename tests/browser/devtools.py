"""Chromium without a window, driven by its DevTools protocol over a pipe: no port, no driver.

https://chromedevtools.github.io/devtools-protocol/
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # a container has no user namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
)
_ATTACHED = ("Page", "Runtime", "Log", "Network", "Accessibility")


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, None when there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Tab:
    """A page of the browser; what happens on it is kept in ``events``."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in _ATTACHED:
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, path: Path, *, width: int = 1000, dark: bool = False) -> None:
        """Open a file at a width, and wait until it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self("Emulation.setDeviceMetricsOverride", **metrics)
        self.events.clear()
        self("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.happened():
            self.events.append(self._read())

    def happened(self) -> set[str]:
        """Return the names of the events so far."""
        return {event["method"] for event in self.events if "method" in event}

    def complaints(self) -> list[dict[str, Any]]:
        """Return what the page wrote to its console, and every error."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in names]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for, its own among them."""
        name = "Network.requestWillBeSent"
        asked = (event["params"] for event in self.events if event.get("method") == name)
        return [each["request"]["url"] for each in asked]

    def run(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press a key, as a keyboard does."""
        for kind in ("rawKeyDown", "keyUp"):
            codes = {"windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key, **codes)


@contextmanager
def opened_tab(chromium: str, profile: Path) -> Iterator[Tab]:
    """Start the browser with an empty profile; end it afterwards."""
    (for_browser, commands), (answers, from_browser) = os.pipe(), os.pipe()
    # It reads from descriptor 3 and writes to 4.
    script = f'exec "$0" "$@" 3<&{for_browser} 4>&{from_browser}'
    arguments = [chromium, *_OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", script, *arguments],
        pass_fds=(for_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(for_browser)
    os.close(from_browser)
    with process, os.fdopen(commands, "wb") as write, os.fdopen(answers, "rb") as read:
        try:
            yield Tab(write, read)
        finally:
            process.terminate()
