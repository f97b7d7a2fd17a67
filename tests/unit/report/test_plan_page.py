"""The page of a ranking: one file, everything in it, and, where Chromium is installed, what it shows."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.config.load import load_run
from meshwright.price.advice import Advice
from meshwright.price.search import search
from meshwright.report.plan_page import page_data, plan_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def advice() -> Advice:
    words = ("model.preset=llama3-8b", "data.sequence_length=4096", "batch.global=32", "precision.compute=bfloat16")
    fixed = {"mesh.pp": 2, "mesh.cp": 1, "parallel.offload": "none"}
    return Advice(search(load_run(None, words), 16, "h100-sxm", top=12, fixed=fixed))


@pytest.fixture(scope="module")
def page(advice: Advice) -> str:
    return plan_page(advice)


def test_it_needs_nothing_else(page: str) -> None:
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", page)
    outside = set(re.findall(r"https?://[^\s\"'<)]+", page)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert "@@" not in page
    assert "default-src 'none'" in page


def test_data_survives_the_embedding(page: str, advice: Advice) -> None:
    text = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    assert json.loads(text[1]) == json.loads(json.dumps(page_data(advice)))


def test_a_name_cannot_leave_its_place(advice: Advice) -> None:
    cluster = advice.ranking.cluster
    named = replace(cluster, device=replace(cluster.device, name="</script><b>"))
    page = plan_page(Advice(replace(advice.ranking, cluster=named)))
    assert "</script><b>" not in page


def test_memory_of_stages_adds_up(advice: Advice) -> None:
    row = page_data(advice)["rows"][0]
    assert [stage["name"] for stage in row["stages"]] == ["first stage", "last stage"]
    fullest = max(sum(stage["bytes"].values()) for stage in row["stages"])
    assert fullest == pytest.approx(row["peak"], rel=1e-6)


def test_parts_add_up_to_the_step(advice: Advice) -> None:
    for row in page_data(advice)["rows"]:
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], rel=1e-6)


def test_one_device_is_told_as_one() -> None:
    words = ("model.preset=gpt2", "data.sequence_length=512", "batch.global=4", "precision.compute=bfloat16")
    page = plan_page(Advice(search(load_run(None, words), 1, "h100-sxm", top=1)))
    assert "<h1>gpt2 on 1 device</h1>" in page
    assert "one rank sends nothing" in page


_PROBE = """<script>
const rows = () => document.querySelectorAll('#table tbody tr').length, out = {};
out.rows = rows(); out.bars = document.querySelectorAll('#memory .bar i').length;
out.bar_labels = document.querySelectorAll('#memory .bar b').length;
out.width = document.documentElement.scrollWidth; out.inner = window.innerWidth;
out.front = document.querySelectorAll('#pareto path.front').length;
out.cells = document.querySelectorAll('#map .cells button').length;
out.timeline = document.querySelectorAll('svg.timeline rect').length;
out.first = [...document.querySelector('#table tbody tr').cells].slice(1, 3).map(cell => cell.textContent);
const dots = [...document.querySelectorAll('#pareto circle.dot')];
const ring = document.querySelector('#pareto circle[r="10"]');
const apart = dot => Math.hypot(...['cx', 'cy'].map(name => dot.getAttribute(name) - ring.getAttribute(name)));
out.apart = Math.min(...dots.map(apart));
out.label = document.querySelector('#pareto text').getBoundingClientRect().height;
out.before = document.getElementById('answer').textContent;
const slow = document.getElementById('s-device'); slow.value = -1; slow.dispatchEvent(new Event('input'));
out.after = document.getElementById('answer').textContent;
document.getElementById('reset').click(); out.reset = document.getElementById('answer').textContent;
const box = document.getElementById('f-text'); box.value = 'no-such-layout'; box.dispatchEvent(new Event('input'));
out.none = document.querySelector('#table tbody').textContent; box.value = ''; box.dispatchEvent(new Event('input'));
const first = document.querySelector('#table tbody tr'); first.focus();
first.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}));
out.moved = document.activeElement === first.nextSibling;
document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}));
const chosen = tr => tr.getAttribute('aria-selected') === 'true';
out.chosen = [...document.querySelectorAll('#table tbody tr')].findIndex(chosen);
const dark = getComputedStyle(document.body).backgroundColor; document.getElementById('theme').click();
out.themed = dark !== getComputedStyle(document.body).backgroundColor;
document.body.append(Object.assign(document.createElement('pre'), {id: 'probe', textContent: JSON.stringify(out)}));
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("width", [1280, 400])
def test_it_works_in_a_browser(page: str, advice: Advice, tmp_path: Path, width: int) -> None:
    file = tmp_path / "plan.html"
    # A frame of the asked width: windows have a least width of their own.
    (tmp_path / "inner.html").write_text(page.replace("</body>", _PROBE + "</body>"), encoding="utf-8")
    file.write_text(
        f'<iframe src="inner.html" style="width:{width}px;height:3000px;border:0"></iframe>'
        "<script>onload = () => document.body.append(Object.assign(document.createElement('pre'), {id: 'out', "
        "textContent: frames[0].document.getElementById('probe').textContent}));</script>",
        encoding="utf-8",
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags.append(f"--user-data-dir={tmp_path}/profile")
    command = [str(CHROMIUM), *flags, "--virtual-time-budget=3000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    found = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    out = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    data = page_data(advice)
    assert out["inner"] == width
    assert out["width"] <= width  # nothing makes the page scroll sideways
    assert out["rows"] == len(data["rows"])
    price = advice.ranking.best.price
    assert out["first"] == [f"{price.step_seconds:.3f} s", f"{price.memory['peak'] / 1e9:.1f} GB"]
    assert out["label"] > 10  # words of the plot keep their size however narrow it is
    assert out["apart"] < 0.1  # a mesh stands where its best layout does: drawn at what both reserve
    assert out["bar_labels"] == 2
    assert out["bars"] > 4
    assert out["front"] == len(advice.ranking.pareto)
    assert out["cells"] == 16
    assert out["timeline"] > 10
    assert out["after"] != out["before"] == out["reset"]
    assert out["none"] == "no layout passes the filters"
    assert out["moved"]
    assert out["chosen"] == 1
    assert out["themed"]
