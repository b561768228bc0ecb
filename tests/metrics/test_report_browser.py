"""The report page in headless Chromium: nothing wider than a phone, its own script runs, a stranger's does not."""

import html
import json
import re
import shutil
import subprocess

import pytest
from test_report import EVIL, make_run, train

from rookery.metrics.report import write_report

pytestmark = pytest.mark.browser
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--virtual-time-budget=5000", "--dump-dom"]
# The page in a frame of a phone's width; what is found is written where --dump-dom shows it.
FRAME = """<!doctype html><body><iframe id=frame style="width:{width}px;height:844px;border:0" srcdoc="{page}"></iframe>
<script>frame.onload = () => {{
  const inner = frame.contentDocument, root = inner.documentElement, wide = [];
  const measure = name => {{
    for (const each of inner.querySelectorAll('body *'))
      if (each.getClientRects().length && each.getBoundingClientRect().right > root.clientWidth + 1)
        wide.push(name + each.className);
  }};
  measure('steps ');
  inner.getElementById('time').click();
  for (const each of inner.querySelectorAll('details')) each.open = true;
  measure('time ');
  const plot = inner.querySelector('.plot.by-time'), box = plot.getBoundingClientRect();
  const at = {{clientX: box.left + box.width * .7, clientY: box.top + 5, bubbles: true}};
  plot.dispatchEvent(new frame.contentWindow.PointerEvent('pointermove', at));
  const found = {{over: root.scrollWidth - root.clientWidth, wide, tip: plot.querySelector('.tip')?.textContent,
    hidden: inner.querySelectorAll('.plot.by-steps').length
      && getComputedStyle(inner.querySelector('.plot.by-steps')).display,
    evil: typeof frame.contentWindow.evil, images: inner.images.length}};
  document.body.dataset.found = JSON.stringify(found);
}}</script>"""


def opened(path, tmp_path, width=390):
    """What the browser finds in a page of that width."""
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width, page=html.escape(path.read_text())))
    browser = shutil.which("chromium")
    assert browser, "chromium is not installed: make test-report installs it"
    words = [browser, *FLAGS, f"--user-data-dir={tmp_path / 'browser'}", frame.as_uri()]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'data-found="([^"]*)"', shown)
    assert found, shown[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("count", [1, 3, 12])
def test_nothing_overflows_on_a_phone(tmp_path, count):
    said = [{"kind": "message", "env_steps": 1, "wall_s": 5.0, "text": "x" * 900 + " /a/long/path" * 30}]
    long = [train(i, losses={"a" * 90: i, "kl": i}, info={"spl": 1e-7 * i}) for i in range(90)]
    runs = [make_run(tmp_path / ("n" * 90) / str(i), long, said, env="E" * 120, seed=i) for i in range(count)]
    found = opened(write_report(runs, tmp_path / "page.html"), tmp_path)
    assert found["over"] == 0 and found["wide"] == []
    assert found["hidden"] == "none" and re.match(r"[\d.,]+ s\n", found["tip"])


def test_a_strangers_script_does_not_run(tmp_path):
    evil = EVIL.replace("alert(1)", "window.evil=1").replace("alert(2)", "window.evil=2")
    run = make_run(tmp_path / "run", [train(i, info={evil: i}, advice=evil) for i in range(5)], recipe=evil, env=evil)
    page = write_report([run], tmp_path / "page.html")
    found = opened(page, tmp_path)
    assert found["evil"] == "undefined" and found["images"] == 0
    page.write_text(
        page.read_text().replace("</main>", "</main><script>window.evil=3</script><img src=x onerror=evil=4>")
    )
    assert opened(page, tmp_path)["evil"] == "undefined"  # the policy refuses what escaping would have missed
