"""The style sheet and the script of a page: constant texts, which the page's policy names by hash.

The script sets texts, attributes and classes of elements that are there; it creates none.
"""

from memfit.cli.render.svg import palette, style

_LAYOUT = """
.memfit{background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,'Segoe UI',
sans-serif;overflow-wrap:anywhere}
body.memfit{margin:0 auto;max-width:60rem;padding:1rem}
.memfit h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}
.memfit h2{font-size:1.15rem;margin:1.6rem 0 .4rem}
.memfit p,.memfit ul,.memfit ol{margin:.4rem 0}
.memfit .dim{color:var(--dim)}
.memfit .verdict{border-left:.4rem solid var(--edge);border-radius:.25rem;font-weight:600;
padding:.6rem .8rem;background:var(--unknown);--edge:var(--dim)}
.memfit .verdict.fits{background:var(--fits)}
.memfit .verdict.tight{background:var(--tight)}
.memfit .verdict.exceeds{background:var(--exceeds);--edge:var(--over)}
.memfit .scroll{overflow-x:auto;margin:.6rem 0;position:relative}
.memfit table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
.memfit caption{text-align:left;font-weight:600;padding:.3rem 0}
.memfit th,.memfit td{border-bottom:1px solid var(--rule);padding:.3rem .6rem;text-align:left;
vertical-align:top;overflow-wrap:normal}
.memfit .r{text-align:right;white-space:nowrap}
.memfit .name{min-width:8rem;overflow-wrap:anywhere}
.memfit tbody th{font-weight:400;position:sticky;left:0;background:var(--paper)}
.memfit tbody th:not(.name){white-space:nowrap}
.memfit .total>*{font-weight:600}
.memfit td.heat{border:2px solid var(--paper);text-align:center;white-space:nowrap}
.memfit td.fits{background:var(--fits)}
.memfit td.tight{background:var(--tight)}
.memfit td.exceeds{background:var(--exceeds)}
.memfit td.unknown{background:var(--unknown)}
.memfit pre{background:var(--unknown);border-radius:.25rem;font-size:.85rem;padding:.6rem .8rem;
white-space:pre-wrap;margin:.4rem 0}
.memfit figure{margin:1rem 0;max-width:36rem}
.memfit svg{display:block;width:100%;height:auto}
.memfit summary{cursor:pointer;padding:.3rem 0}
.memfit :focus-visible{outline:3px solid var(--k0);outline-offset:2px}
.memfit .hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.memfit .sliders{display:grid;gap:.5rem 1rem;
grid-template-columns:repeat(auto-fit,minmax(15rem,1fr))}
.memfit .sliders label{display:block;font-weight:600}
.memfit .sliders input{width:100%;height:2rem;margin:0;accent-color:var(--k0)}
.memfit meter{width:100%;height:1.2rem}
.memfit footer{border-top:1px solid var(--rule);margin-top:2rem;padding:.6rem 0}
@media (max-width:40rem){
.memfit .stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.memfit .stack,.memfit .stack tbody,.memfit .stack caption:not(.hidden){display:block}
.memfit .stack tr{display:flex;flex-wrap:wrap;gap:.1rem .9rem;padding:.5rem 0;
border-bottom:1px solid var(--rule)}
.memfit .stack tbody th,.memfit .stack td{border:0;padding:0;white-space:normal;text-align:left;
position:static}
.memfit .stack tbody th,.memfit .stack td.name{flex-basis:100%;min-width:0}
.memfit .stack tbody th{font-weight:600}
.memfit .stack td.heat,.memfit .stack td.fits,.memfit .stack td.exceeds{padding:0 .5rem}
.memfit .stack td:empty{display:none}
.memfit .stack [data-label]::before{content:attr(data-label) ": ";color:var(--dim);font-weight:400}
.memfit .stack tbody th::before{content:none!important}
}
[hidden]{display:none!important}
"""

STYLE = palette() + _LAYOUT.replace("\n", "") + style()

SCRIPT = """"use strict";
(() => {
  const section = document.getElementById("sliders");
  const data = JSON.parse(document.getElementById("points").textContent);
  const inputs = [...section.querySelectorAll("input")];
  const cells = [...section.querySelectorAll("td")];
  const answer = document.getElementById("answer");
  const meter = section.querySelector("meter");
  const show = () => {
    let index = 0;
    inputs.forEach((input, place) => {
      const values = data.values[place];
      const text = data.texts[values[input.valueAsNumber]];
      index = index * values.length + input.valueAsNumber;
      input.setAttribute("aria-valuetext", text);
      document.getElementById(input.id + "-value").textContent = text;
    });
    const [verdict, share, sentence, ...rest] = data.points[index];
    answer.className = "verdict " + data.verdicts[verdict];
    answer.textContent = data.texts[sentence];
    cells.forEach((cell, place) => { cell.textContent = data.texts[rest[place]]; });
    if (meter) meter.value = share;
  };
  inputs.forEach((input) => input.addEventListener("input", show));
  section.hidden = false;
  show();
})();
"""
