"""Write docs/page-wide.png and docs/page-phone.png: the page while SmolLM2 answers. Run by ``make screenshots``."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PROMPT = "Name three rivers and say where each begins."
TEXTS = "[...document.querySelectorAll('.answer .text')].map((each) => each.textContent.length)"
SIZES = {"wide": (1280, 860, "light", 3), "phone": (390, 1180, "dark", 2)}


def main() -> None:
    """Serve, ask, and take one picture of each size."""
    spec = importlib.util.spec_from_file_location("browser", HERE / "browser.py")
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    if browser.find() is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    program = "from oarlock.plugins.cli import main; main()"
    options = ["--port", "0", "--temperature", "0.5", "--min-p", "0.1"]
    command = [sys.executable, "-c", program, "serve", "smollm2", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(found[1] for line in server.stderr if (found := re.search(r"its page at (\S+)", line)))
            for name, shape in SIZES.items():
                picture = take(browser, url, *shape)
                (ROOT / "docs" / f"page-{name}.png").write_bytes(picture)
                print(f"docs/page-{name}.png: {len(picture):,} bytes")
        finally:
            server.terminate()


def take(browser, url, width, height, scheme, rows) -> bytes:
    """Return the page of one size, in the middle of its answers."""
    with browser.Browser(width, height) as page:
        page.prefer(scheme)
        page.open(url)
        page.until("document.getElementById('model').textContent.includes('rows together')")
        page.evaluate(f"document.getElementById('rows').value = {rows}")
        page.type(PROMPT)
        page.press("Enter")
        page.until(f"{TEXTS}.length === {rows} && {TEXTS}.every((each) => each > 60)", seconds=60)
        page.until(f"[...document.querySelectorAll('.phase.decode')].length === {rows}")
        page.evaluate("window.scrollTo(0, 0)")
        return page.screenshot()


if __name__ == "__main__":
    main()
