"""Pages in Chromium, at the width of a desk and of a telephone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURES = Path(os.environ.get("PAGES") or Path(__file__).parents[1] / "runs/pages")
WIDTHS = {"desk": 1280, "telephone": 390}
# It takes a second or two, and more than 90 where others have the processors.
MOST_S = 300


def run_browser(width: int, *arguments: object) -> str:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={width},6000", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=MOST_S).stdout


def picture_of(page: Path, name: str, width: int) -> None:
    """For the eye, into runs/pages, or the folder that PAGES names."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{name}_{width}.png"
    run_browser(width, f"--screenshot={picture}", page.as_uri())
    assert picture.stat().st_size > 10_000


def measure(text: str, script: str, copy: Path, width: int) -> Any:
    """What a script posts to the frame that a page stands in, from a copy of the page that has the script.

    A window is never narrower than 500 pixels; a frame in it is.
    """
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    frame = copy.with_suffix(".frame.html")
    frame.write_text(
        f'<iframe style="border:0;width:{width}px;height:6000px" src="{copy.as_uri()}"></iframe>'
        "<script>addEventListener('message', e => document.body.innerHTML = '<pre>' + e.data + '</pre>')</script>"
    )
    shown = run_browser(1400, "--virtual-time-budget=5000", "--dump-dom", frame.as_uri())
    found = re.search(r"<pre>(.*?)</pre>", shown, re.S)
    assert found, shown[-500:]
    return json.loads(html.unescape(found[1]))
