"""The frame of the report page: its style, its script, and the policy that lets the browser run nothing else.

The script is ours alone: the page names its digest, so that a browser refuses every other script, also one that had
slipped through escaping. Nothing is loaded from a network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from rookery.metrics.chart import STAGES, escape

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f7f8;--ink:#1d2328;--soft:#5d6870;--rule:#dfe3e6;--bad:#b3261e;
--r0:#0072b2;--r1:#c25200;--r2:#00835f;--r3:#b05a8d;--r4:#2d8fc4;--r5:#a86f00;--r6:#333;
--s0:#56b4e9;--s1:#0072b2;--s2:#009e73;--s3:#e6b800;--s4:#d55e00;--s5:#cc79a7;--s6:#9aa3a9}
@media (prefers-color-scheme:dark){:root{--paper:#14181b;--card:#1d2327;--ink:#e6eaec;--soft:#9daab2;--rule:#343c42;
--bad:#ff8a80;--r0:#58b1ea;--r1:#ff8f4a;--r2:#3ccf9f;--r3:#e79ac4;--r4:#8fd0f5;--r5:#f0b840;--r6:#eee}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:16px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5em;line-height:1.2;margin:.3em 0 .2em}h2{font-size:1.15em;margin:2em 0 .6em}
p,ul,dl{margin:.4em 0}.soft,figcaption,dt{color:var(--soft)}.bad{color:var(--bad)}
ul{padding:0;list-style:none}.runs,.charts{display:grid;gap:14px;
grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr))}
.run,figure{background:var(--card);border-radius:8px;padding:10px 12px;margin:0;min-width:0}
figure.big{grid-column:1/-1}.facts{display:grid;font-size:14px;gap:0 28px;
grid-template-columns:repeat(auto-fill,minmax(min(100%,220px),1fr))}
.facts div{display:flex;justify-content:space-between;gap:12px}
.facts dd{margin:0;text-align:right;font-variant-numeric:tabular-nums}
.run:only-child,.wide figure:only-child{grid-column:1/-1}
.badge{display:inline-block;min-width:1.5em;padding:0 .3em;border-radius:4px;text-align:center;color:var(--paper)}
.plot{position:relative;height:130px;margin:8px 12px 20px 44px}.big .plot{height:260px}.several .plot{margin-right:24px}
.plot svg,.strip svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.line,.dot,.grid,.target,.mark{fill:none;vector-effect:non-scaling-stroke}
.line{stroke-width:1.8;stroke-linejoin:round}.dot{stroke-width:8;stroke-linecap:round}.grid{stroke:var(--rule);stroke-width:1}
.resumed{fill:none;vector-effect:non-scaling-stroke;stroke:var(--soft);stroke-width:1.2;stroke-dasharray:1 3}
.plot .changed{top:2px;max-height:96%;overflow:hidden;text-overflow:ellipsis;writing-mode:vertical-rl;
transform:translateX(-100%);margin-left:-2px}
.target{stroke:var(--soft);stroke-width:1;stroke-dasharray:5 4}.mark{stroke:var(--bad);stroke-width:2}
.d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 4}.d3{stroke-dasharray:9 3 2 3}
.plot span,.strip span,.end{position:absolute;font-size:11px;line-height:1;color:var(--soft);white-space:nowrap}
.y{right:100%;margin-right:6px;transform:translateY(-50%)}.x{top:100%;margin-top:6px;transform:translateX(-50%)}
.goal{left:4px;transform:translateY(-130%)}.end{margin-left:5px;transform:translateY(-50%);font-size:12px}
.strip{position:relative;height:22px;margin:8px 24px 26px}.bar{display:block;margin-top:4px;
width:100%;height:20px;border-radius:4px}
.keys{display:flex;flex-wrap:wrap;gap:0 14px;font-size:13px}
.key{margin-right:4px;display:inline-block;width:.8em;height:.8em;border-radius:2px}
.said{max-height:340px;overflow-y:auto;font-size:13px}.said li{padding:4px 0;border-top:1px solid var(--rule);
white-space:pre-wrap}
.fields dd{margin:0 0 .5em;display:flex;flex-wrap:wrap;gap:2px 14px}.fields{font-size:14px}
summary{cursor:pointer}video{width:100%;border-radius:4px;background:#000}
.choice{position:absolute;opacity:0}.switch{display:inline-flex;gap:4px;margin:8px 0 14px}
.switch label{padding:3px 12px;border:1px solid var(--rule);border-radius:14px;cursor:pointer;color:var(--soft)}
#steps:checked~main .by-time,#time:checked~main .by-steps{display:none}
#steps:checked~main .for-steps,#time:checked~main .for-time{background:var(--ink);color:var(--paper)}
#steps:focus-visible~main .for-steps,#time:focus-visible~main .for-time{outline:2px solid var(--r0)}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);pointer-events:none}
.tip{position:absolute;top:0;z-index:2;padding:3px 7px;border-radius:5px;background:var(--ink);color:var(--paper);
font-size:12px;line-height:1.35;white-space:pre;pointer-events:none}
"""
STYLE += "".join(
    f".line.r{run},.dot.r{run}{{stroke:var(--r{run})}}.badge.r{run}{{background:var(--r{run})}}.end.r{run}{{color:var(--r{run})}}"
    for run in range(7)
)
STYLE += "".join(f".s{stage}{{fill:var(--s{stage});background:var(--s{stage})}}" for stage in range(STAGES))

SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const cursor = document.createElement('div'), tip = document.createElement('div'), data = plot.dataset;
  cursor.className = 'cursor'; tip.className = 'tip';
  const hide = () => { cursor.remove(); tip.remove(); };
  const say = value => Number(value.toPrecision(4)).toLocaleString('en', {maximumSignificantDigits: 4});
  const lines = Array.from(plot.querySelectorAll('.line'), line => [line.dataset.run,
    line.getAttribute('points').split(' ').map(point => point.split(',').map(Number))]);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    if (at < 0 || at > 1) return hide();
    const unit = data.axis === 'time' ? ' s' : ' steps', words = [say(at * data.last) + unit];
    for (const [name, points] of lines) {
      const near = points.reduce((a, b) => Math.abs(b[0] - at * 1000) < Math.abs(a[0] - at * 1000) ? b : a);
      if (Math.abs(near[0] - at * 1000) > 60) continue;
      const value = +data.high - near[1] / 1000 * (data.high - data.low);
      words.push((lines.length > 1 ? name + '  ' : '') + say(value));
    }
    tip.textContent = words.join('\\n');
    cursor.style.left = at * 100 + '%';
    tip.style.left = at < .5 ? at * box.width + 8 + 'px' : 'auto';
    tip.style.right = at < .5 ? 'auto' : (1 - at) * box.width + 8 + 'px';
    plot.append(cursor, tip);
  });
  plot.addEventListener('pointerleave', hide);
}
"""
_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_DIGEST}'; media-src data: file: 'self'; "
    "base-uri 'none'; form-action 'none'"
)


def page(title: str, sections: Sequence[str], several: bool) -> str:
    """The whole file. `sections` are markup already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title, 200)}</title><style>{STYLE}</style></head>\n"
        f"<body{' class=several' if several else ''}>"
        '<input class="choice" type="radio" name="axis" id="steps" checked aria-label="over steps">'
        '<input class="choice" type="radio" name="axis" id="time" aria-label="over time">\n'
        f"<main>{chr(10).join(section for section in sections if section)}</main>\n"
        f"<script>{SCRIPT}</script></body></html>\n"
    )
