"""The notebooks: stored without outputs, and run from the first cell to the last."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
SPECULATION = ROOT / "examples" / "speculation.ipynb"
PREFIX_CACHE = ROOT / "examples" / "prefix_cache.ipynb"
ON_DISK = ROOT / "examples" / "cache_on_disk.ipynb"
EXPERIMENT = ROOT / "examples" / "experiment.ipynb"
KERNEL = "hybrid-jax-tests"
# In a process of its own: what the notebook's libraries warn of is not this package's business.
RUN = f"""
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=nbformat.NO_CONVERT)
nbformat.validate(notebook)
client = NotebookClient(notebook, kernel_name={KERNEL!r}, timeout=1200, startup_timeout=300)
client.execute(cwd=sys.argv[2])
nbformat.write(notebook, sys.argv[2] + "/run.ipynb")
"""


def run(notebook: Path, folder: Path) -> dict[str, list[dict]]:
    """Runs every cell with this interpreter, whatever kernels the machine has; cell id to outputs.

    Raises:
        AssertionError: a cell raised, or the notebook is not valid.
    """
    kernel = folder / "kernels" / KERNEL
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": KERNEL, "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    places = ("IPYTHONDIR", "JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    settings = os.environ | dict.fromkeys(places, str(folder))
    settings["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [settings.get("PYTHONPATH")])]
    )
    settings["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir or str(folder)
    settings.pop("MPLBACKEND", None)
    command = [sys.executable, "-c", RUN, str(notebook), str(folder)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cells = json.loads((folder / "run.ipynb").read_text())["cells"]
    return {cell["id"]: cell["outputs"] for cell in cells if cell["cell_type"] == "code"}


def printed(outputs: list[dict], name: str = "stdout") -> str:
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == name)


@pytest.mark.parametrize(
    "path", [NOTEBOOK, SPECULATION, PREFIX_CACHE, EXPERIMENT, ON_DISK], ids=lambda path: path.stem
)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_talks_about(tmp_path):
    outputs = run(NOTEBOOK, tmp_path)
    assert printed(outputs["load"], "stderr").startswith("model ")
    text = printed(outputs["generate"]).removesuffix("\n")
    assert text.strip()
    assert printed(outputs["stream"]) == printed(outputs["astream"]) == text
    first, second = printed(outputs["cache"]).splitlines()
    hits = [
        int(re.match(r"request \d+: (\d+) of \d+ prompt tokens", line)[1])
        for line in (first, second)
    ]
    assert hits[0] == 0 < hits[1]
    [stats] = outputs["stats"]
    assert "'requests': 4" in "".join(stats["data"]["text/plain"])
    assert len(printed(outputs["sample"]).splitlines()) == 3
    [figure] = [output["data"] for output in outputs["plot"] if "data" in output]
    assert len(figure["image/png"]) > 5000


@pytest.mark.slow
def test_the_notebook_on_speculation_shows_what_was_accepted(tmp_path):
    outputs = run(SPECULATION, tmp_path)
    lines = printed(outputs["drafters"]).splitlines()
    brings = {line[:16].strip(): float(line[16:].split()[0]) for line in lines}
    assert len(brings) == 3 and brings["mtp, 5 drafts"] > brings["ngram, 5 drafts"] > 1
    [figure] = [output["data"] for output in outputs["plot"] if "data" in output]
    assert len(figure["image/png"]) > 5000


@pytest.mark.slow
def test_the_notebook_on_a_restart_hits_with_its_first_prompt(tmp_path):
    outputs = run(ON_DISK, tmp_path)
    [first] = outputs["restart"]
    found = ast.literal_eval("".join(first["data"]["text/plain"]))
    assert found["disk"] > 200 and found["memory"] == found["host"] == 0
    [figure] = [output["data"] for output in outputs["plot"] if "data" in output]
    assert len(figure["image/png"]) > 5000
    assert "of 1 model" in printed(outputs["folder"])


def html_of(outputs: list[dict]) -> str:
    return "".join(
        "".join(output["data"].get("text/html", "")) for output in outputs if "data" in output
    )


@pytest.mark.slow
def test_the_notebook_on_the_cache_shows_hits_and_evictions(tmp_path):
    outputs = run(PREFIX_CACHE, tmp_path)
    assert "class Reader" in html_of(outputs["grow"])
    assert html_of(outputs["hit"]).startswith("<div")
    hit = re.search(r"(\d+) of \d+ prompt tokens came from", printed(outputs["hit-text"]))
    assert int(hit[1]) > 0
    assert "evicted" in printed(outputs["again"])
    for cell in ("evict", "tree"):
        [figure] = [o["data"] for o in outputs[cell] if "image/png" in o.get("data", {})]
        assert len(figure["image/png"]) > 5000
    assert len(printed(outputs["what-if"]).splitlines()) == 4
    assert "look-ups that resumed" in html_of(outputs["stats"])


@pytest.mark.slow
def test_the_experiment_measures_what_rounding_costs(tmp_path):
    outputs = run(EXPERIMENT, tmp_path)
    whole = float(re.match(r"([\d.]+) bits per byte", printed(outputs["text"]))[1])
    lines = printed(outputs["measure"]).splitlines()
    loss = {int(line.split()[0]): float(line.split()[2]) for line in lines}
    assert 0.5 < whole < 2 and abs(loss[8] - whole) < 0.02 < loss[2] - whole
    [figure] = [o["data"] for o in outputs["plot"] if "image/png" in o.get("data", {})]
    assert len(figure["image/png"]) > 5000


BAR = """
import time
from hybrid_jax.api.progress_bar import progress_of, show_compiling

show_compiling("writing tokens", lambda: (1, 2))
with progress_of(True, "generating") as report:
    show_compiling("reading prompts", lambda: (2, 2))
    for done in range(6):
        report(done, 6)
        time.sleep(0.3)
show_compiling("", None)
"""


@pytest.mark.slow
def test_bar_and_words_are_updated_in_their_outputs_and_cleared(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BAR, id="bar")])
    (tmp_path / "bar.ipynb").write_text(nbformat.writes(notebook))
    outputs = run(tmp_path / "bar.ipynb", tmp_path)["bar"]
    # Words alone, and the bar with words below it.
    assert [html_of([output]) for output in outputs] == ["", ""]


@pytest.mark.slow
def test_a_cell_that_raises_is_seen(tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == "load"]
    cell["source"] = "import sys\nraise RuntimeError('run by ' + sys.executable)"
    broken = tmp_path / "broken.ipynb"
    broken.write_text(json.dumps(notebook))
    with pytest.raises(AssertionError, match=re.escape(f"run by {sys.executable}")):
        run(broken, tmp_path)
