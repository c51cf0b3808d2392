"""How the status page looks: light and dark, wide and narrow."""

STYLE = """
:root{--ink:#1b1f24;--faint:#59636e;--line:#d8dee4;--page:#fff;--card:#f6f8fa;
--good:#116329;--warn:#7d4e00;--bad:#b3141d;--plot:#0969da;--fill:#0969da22}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--faint:#9198a1;--line:#30363d;
--page:#0d1117;--card:#161b22;--good:#4ac26b;--warn:#d4a72c;--bad:#ff7b72;--plot:#58a6ff;
--fill:#58a6ff22}}
*{box-sizing:border-box}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;padding:1rem 1.25rem 2rem;max-width:80rem;
color:var(--ink);background:var(--page);overflow-wrap:break-word}
h1{font-size:1.3rem;margin:0}h2{font-size:1.05rem;margin:1.75rem 0 .5rem}
header{display:flex;flex-wrap:wrap;align-items:baseline;gap:.25rem 1rem}
header dl{flex-basis:100%}
.state{margin:0}.state span{color:var(--faint)}
.ready b,.word.ready,.word.closed{color:var(--good)}
.word.pending,.word.draining,.word.half_open{color:var(--warn)}
.not-ready b,.word.unhealthy,.word.open{color:var(--bad)}
dl{display:flex;flex-wrap:wrap;gap:.35rem 1.75rem;margin:.5rem 0}
dt{color:var(--faint);font-size:.82rem}dd{margin:0}
small{display:block;color:var(--faint);font-size:.82rem}
.note{color:var(--faint);margin:.35rem 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;
margin-top:.75rem}
figure{display:flex;flex-direction:column;justify-content:space-between;margin:0;
padding:.5rem .65rem;background:var(--card);border-radius:6px}
figcaption{display:flex;justify-content:space-between;gap:.5rem;font-size:.85rem}
svg{display:block;width:100%;height:3rem;margin:.2rem 0}
.line{fill:none;stroke:var(--plot);stroke-width:1.5;vector-effect:non-scaling-stroke}
.area{fill:var(--fill)}.base{stroke:var(--line)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--faint);font-weight:600;font-size:.82rem}
th,td{padding:.4rem .75rem .4rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th,td b{white-space:nowrap}
td:last-child{padding-right:0}
td small{overflow-wrap:anywhere}
nav{margin-top:1.75rem;display:flex;gap:1.25rem}
a{color:var(--plot)}
@media (max-width:44rem){
thead{display:none}
table,tbody{display:block}
tr{display:block;padding:.5rem 0;border-bottom:1px solid var(--line)}
td{display:grid;grid-template-columns:5.5rem 1fr;gap:0 .5rem;border:0;padding:.1rem 0}
td>*{grid-column:2;min-width:0;overflow-wrap:anywhere}
td::before{content:attr(data-label);color:var(--faint);font-size:.82rem;grid-column:1}
}
"""
