"""The report page: what it says of a run, of several, and of run directories that are odd."""

import json
import os
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tputrain.cli import main
from tputrain.errors import UserError
from tputrain.figures import bytes_text, memory_text, moment, plain, scientific, seconds_text
from tputrain.report import read_run, report_page
from tputrain.report.chart import Line, bar_chart, line_chart
from tputrain.report.series import MOST_POINTS, histogram, is_noisy, percentile, smoothed, thinned
from tputrain.run_lock import RunLock, is_locked

CONFIG = {"seed": 0, "trainer": {"steps": 40, "max_grad_norm": None}, "optim": {"learning_rate": 0.003}}


def step(number: int, **more: object) -> dict:
    return {
        "step": number,
        "loss": 8.0 / number,
        "learning_rate": 1e-3,
        "grad_norm": 0.5,
        "tokens": 1000 * number,
        "tokens_per_second": 4000.0,
        "step_seconds": 0.25 + 0.001 * number,
        "host_seconds": 0.01,
        "compilations": int(number in (1, 21)),
        "peak_memory_bytes": 200_000_000 + number,
        **more,
    }


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def make_run(directory: Path, config: dict = CONFIG, **more: object) -> Path:
    """A run of 40 steps that was resumed once, at step 20."""
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text(lines([step(number, **more) for number in range(1, 41)]))
    evaluated = [
        {"step": at, "loss": 5.0 - at / 20, "perplexity": 90.0 - at, "seconds": 1.0} for at in (0, 20, 40)
    ]
    (directory / "evaluations.jsonl").write_text(lines(evaluated))
    started = {
        "event": "started",
        "command": "tputrain run llama trainer.steps=40",
        "config": config,
        "changed": {"trainer.steps": 40},
        "environment": {"torch": "2.13.0", "device": "cpu"},
    }
    events = [
        {**started, "step": 0, "time": 1_000_000.0},
        {"event": "saved", "step": 20, "time": 1_000_100.0},
        {**started, "step": 20, "time": 1_000_200.0},
        {"event": "saved", "step": 40, "time": 1_000_300.0},
    ]
    (directory / "events.jsonl").write_text(lines(events))
    return directory


class Seen(HTMLParser):
    """The text of a page, its charts, and everything it would load."""

    def __init__(self, page: str):
        super().__init__()
        self.text = ""
        self.loaded: list[str] = []
        self.titles: list[str] = []
        self.feed(page)
        self.charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", page, re.S)]

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data"):
                self.loaded.append(str(value))
            if name == "title":
                self.titles.append(str(value))

    def handle_data(self, data):
        self.text += data + "\n"


def test_a_page_says_what_a_run_came_to(tmp_path):
    page = report_page([read_run(make_run(tmp_path / "a"))])
    seen = Seen(page)
    assert not seen.loaded
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for title in (
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "Step times",
        "Peak memory",
        "Perplexity",
    ):
        assert f"{title}\n" in seen.text or f"{title} \n" in seen.text
    assert "Model FLOPs utilisation" not in seen.text  # it was not logged
    for figure in (
        "40 of 40",
        "40,000",
        "3.0000 at step 40",
        "270 ms / 286 ms / 290 ms",
        "10.8 s",
        "200 MB",
        "once",
    ):
        assert f"\n{figure}\n" in seen.text, figure
    assert "optim.learning_rate" in seen.text
    assert "2.13.0" in seen.text
    assert any(title.startswith("started at step 0, 1970-01-12") for title in seen.titles)
    assert any(title.startswith("resumed at step 20") for title in seen.titles)
    assert any(title.startswith("saved at step 40") for title in seen.titles)
    assert {"step 1: 1 compiled", "step 21: 1 compiled"} <= set(seen.titles)


def test_the_command_and_what_is_not_the_default_come_first(tmp_path):
    page = report_page([read_run(make_run(tmp_path / "a"))])
    assert "<p><code>tputrain run llama trainer.steps=40</code> on cpu</p>" in page.partition("<h2>")[0]
    changed = page.partition("<h3>Not as by default</h3>")[2].partition("</table>")[0]
    assert re.findall("<th>(.*?)</th><td>(.*?)</td>", changed) == [("trainer.steps", "40")]


def test_a_noisy_curve_is_drawn_faintly_behind_a_smoothed_one(tmp_path):
    page = report_page([read_run(make_run(tmp_path / "calm"))])
    assert "faint" not in re.sub("<style>.*?</style>", "", page, flags=re.S)
    noisy = make_run(tmp_path / "noisy")
    records = [step(number, loss=5 - number / 100 + number % 2) for number in range(1, 201)]
    (noisy / "metrics.jsonl").write_text(lines(records))
    chart = next(svg for svg in Seen(report_page([read_run(noisy)])).charts if "smoothed" in str(svg.attrib))
    drawn = [line.attrib["class"] for line in chart.iter() if line.tag.endswith("polyline")]
    assert drawn[:2] == ["r0 faint", "r0"]


def test_smoothing_follows_the_curve_and_is_not_biased_to_zero():
    values = [(float(x), 4.0 + (-1) ** x) for x in range(200)]
    assert is_noisy(values)
    assert not is_noisy([(x, 4.0 - 0.01 * x) for x, _ in values])
    averages = [y for _, y in smoothed(values)]
    assert all(3.0 <= y <= 5.0 for y in averages)
    assert abs(averages[-1] - 4.0) < 0.3


def test_what_is_logged_under_another_name_is_drawn_under_that_name(tmp_path):
    seen = Seen(report_page([read_run(make_run(tmp_path / "a", mfu=0.41, router_entropy=1.5))]))
    assert "Model FLOPs utilisation\n" in seen.text
    assert "router entropy\n" in seen.text


def test_runs_are_compared_on_the_same_axes_and_by_what_differs(tmp_path):
    other = {**CONFIG, "optim": {"learning_rate": 0.001}}
    first, second = make_run(tmp_path / "x" / "run"), make_run(tmp_path / "y" / "run", other)
    page = report_page([read_run(first), read_run(second)])
    seen = Seen(page)
    assert "x/run" in seen.text
    assert "y/run" in seen.text
    differing = page.partition("Configuration: what differs")[2].partition("</table>")[0]
    assert "optim.learning_rate" in differing
    assert "<td>0.003</td><td>0.001</td>" in differing
    assert "trainer.steps" not in differing
    curves = [len(list(chart.iter("polyline"))) for chart in seen.charts]
    assert set(curves) <= {0, 2}
    with pytest.raises(UserError, match="named twice"):
        report_page([read_run(first), read_run(first)])


def test_text_from_a_run_is_no_markup(tmp_path):
    config = {"data": {"files": "<script>alert(1)</script>"}, "<b>": 1}
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>", config, **{"<i>metric": 1.0})
    page = report_page([read_run(run), read_run(make_run(tmp_path / "plain"))])
    assert page.count("<script>") == 1
    for text in ("<img", "<b>1", "<i>metric"):
        assert text not in page


def test_values_that_are_no_numbers_leave_a_gap(tmp_path):
    run = make_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": null, "loss_hex": "nan", "grad_norm": NaN, "tokens": true}\n')
        file.write(
            '{"step": "x", "loss": 1}\n{"step": NaN}\n{"step": 42, "loss": 1e308, "grad_norm": [1]}\n{"st'
        )
    seen = Seen(report_page([read_run(run)]))
    assert "non-finite losses\n" in seen.text
    assert "nan" not in " ".join(ElementTree.tostring(chart, "unicode").lower() for chart in seen.charts)


def test_a_run_with_one_step_and_nothing_else_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(lines([{"step": 1, "loss": 0.0, "step_seconds": 0.0}]))
    run = read_run(tmp_path)
    assert (run.state, run.step, run.num_steps, run.config) == ("stopped", 1, None, {})
    assert Seen(report_page([run])).charts


def test_the_page_is_written_beside_the_run_or_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert main(["report", str(first)]) == 0
    assert (first / "report.html").stat().st_size < 200_000
    assert main(["report", "a", "b", "-o", "both.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("both.html: 2 runs, ")
    assert main(["report", "a", "b", "-o", "none/both.html"]) == 2
    assert "none/both.html: cannot be written (No such file or directory)" in capsys.readouterr().err
    assert main(["report", "nowhere"]) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err
    os.mkdir("empty")
    assert main(["report", "empty"]) == 2
    assert "empty: no run (neither metrics.jsonl nor checkpoints/)" in capsys.readouterr().err


def test_a_run_is_running_while_its_lock_is_held_and_looking_does_not_disturb_it(tmp_path):
    run = make_run(tmp_path / "a")
    assert read_run(run).state == "finished"
    with RunLock(run):
        assert is_locked(run)
        assert read_run(run).state == "running"
    assert not is_locked(run)


def test_a_run_whose_last_step_is_in_no_checkpoint_is_not_called_finished(tmp_path):
    run = make_run(tmp_path / "a")
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(events[:-1]))
    assert read_run(run).state == "not saved"
    # That another branch of the run was saved further does not count: a process went back since.
    saved, back = (
        {"event": event, "step": step, "time": 9e9} for event, step in (("saved", 99), ("started", 1))
    )
    with (run / "events.jsonl").open("a") as file:
        file.write(f"{json.dumps(saved)}\n{json.dumps(back)}\n")
    assert read_run(run).state == "not saved"
    (run / ".lock").write_text("no number")
    assert not is_locked(run)


def test_long_curves_are_thinned_and_keep_their_mean():
    values = [(float(number), float(number % 7)) for number in range(10_000)]
    kept = thinned(values)
    assert MOST_POINTS / 2 < len(kept) <= MOST_POINTS
    assert sum(y for _, y in kept) / len(kept) == pytest.approx(3.0, abs=0.05)
    assert thinned(values[:MOST_POINTS]) == values[:MOST_POINTS]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [[1.0], [5.0, 5.0], [0.0, 0.0], [-3.0, 4.0], [1e-9, 1e9], [200e6, 200e6 + 1], [1e-30, 2e-30], [1e99]],
)
def test_every_curve_lies_inside_its_chart(values, log):
    svg = line_chart([Line("run", 0, list(enumerate(values)))], len(values), plain, log)
    ticks = ElementTree.fromstring(svg).findall("line[@class='grid']")
    assert 1 <= len(ticks) <= 12
    for x, y in re.findall(r"([\d.-]+),([\d.-]+)", "".join(re.findall(r'points="([^"]*)"', svg))):
        assert 0 <= float(x) <= 420
        assert 0 <= float(y) <= 230


def test_ticks_of_a_nearly_constant_measure_can_be_told_apart():
    svg = line_chart([Line("run", 0, [(0, 206_904_456.0), (9, 206_904_520.0)])], 9, bytes_text)
    said = re.findall(r'text-anchor="end">([^<]* MB)<', svg)
    assert len(said) >= 2
    assert len(set(said)) == len(said)


def test_histograms_count_every_value():
    assert histogram([0.0, 0.4, 0.6, 1.0, 9.0], 0.0, 1.0, 2) == [0.4, 0.6]
    assert "<rect" in bar_chart([(0, [0.5, 0.5])], 0.0, 1.0, plain)
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.51, 1.0)] == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]


def test_numbers_are_written_for_people():
    assert [plain(value) for value in (0, 0.25, 3.14159, 1234.5, 1e-5, 2e8)] == [
        "0", "0.25", "3.142", "1,234", "1e-5", "2e8",
    ]  # fmt: skip
    assert [scientific(value) for value in (0, 3e-4, 1.55e-4, 5)] == ["0", "3e-4", "1.55e-4", "5"]
    sizes = (600, 2**20, 0.1 * 2**30, 9.996 * 2**30, 10.04 * 2**30, 99.96 * 2**30, 5000 * 2**30)
    expected = ["0.6 KiB", "1.0 MiB", "0.10 GiB", "10.0 GiB", "10.0 GiB", "100 GiB", "5,000 GiB"]
    assert [memory_text(size) for size in sizes] == expected
    assert [seconds_text(value) for value in (5e-6, 0.0129, 1.5, 90, 7200)] == [
        "5 µs", "12.9 ms", "1.5 s", "1.5 min", "2 h",
    ]  # fmt: skip
    assert [bytes_text(value) for value in (12, 206_904_456, 3.2e9)] == ["12 B", "207 MB", "3.2 GB"]
    assert moment(0) == moment(1e18) == "–"
