"""The screenshots of docs/reports.md; `python -m tests.browser.screenshots` takes them again."""

import base64
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.browser.devtools import Tab, find_chromium, opened_tab
from tests.cli.test_first_screen import SAMPLES
from tests.test_docs import run

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = f"memfit estimate {SAMPLES}/qwen3.5-35b-a3b.yaml --memory 32GB --output page.html"


class Picture(NamedTuple):
    """The upper part of a page, as a screen shows it."""

    name: str
    width: int
    height: int
    dark: bool

    def taken(self, tab: Tab, page: Path) -> bytes:
        """Return the PNG file of a page."""
        tab.open(page, width=self.width, dark=self.dark)
        clip = {"x": 0, "y": 0, "width": self.width, "height": self.height, "scale": 1}
        shot = tab("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


PICTURES = (
    Picture("page-phone.png", 375, 812, dark=False),
    Picture("page-desktop.png", 1000, 760, dark=True),
)


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file (its first chunk is IHDR)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def main() -> None:
    """Write every picture, where there is a browser."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("Chromium is not installed: the screenshots stay as they are")
    with TemporaryDirectory() as folder:
        out, code = run(COMMAND, folder=Path(folder))
        assert code in (0, 1), out
        with opened_tab(chromium, Path(folder) / "profile") as tab:
            for picture in PICTURES:
                image = picture.taken(tab, Path(folder) / "page.html")
                (DOCS / "images" / picture.name).write_bytes(image)


if __name__ == "__main__":
    main()
