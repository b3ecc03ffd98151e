"""fw-plot from files to files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot
from matplotlib.text import Text

from fw_fairseq import Mistake
from fw_fairseq.tools.plot import __main__ as plots
from fw_fairseq.tools.plot import cost, probes, retrieval
from fw_fairseq.tools.plot.convergence import (
    draw_converged,
    draw_length,
    draw_position,
    draw_translated,
    read_converged,
    read_length,
    read_position,
)
from fw_fairseq.tools.plot.dpfp import surfaces
from fw_fairseq.tools.plot.logs import read_log, read_logs
from fw_fairseq.tools.plot.published import read_losses
from fw_fairseq.tools.plot.retrieval import SOLVED, number, point_of_log, read_results
from fw_fairseq.tools.plot.style import SMALL, canvas, legend, log_values, look, plot, save, spread_out
from fw_fairseq.tools.plot.wikitext2 import draw_conversion, draw_parts, draw_state, read_table

RESULTS = "dpfp1 20 0.0008\ndpfp1 40 0.2\nelu 20 0.001\nelu 40 0.3\n"
UPDATES = "delta:dpfp1 20 0.0002\nother:map 20 30\n"
LOG = (
    '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "9", "num_updates": "1"}\nnoise { not json\n'
    '... | INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_num_updates": "1"}\n'
    '... | INFO | valid | {"epoch": 2, "valid_loss": "7.5", "valid_num_updates": "2"}\n'
)
SIMPLE = (
    "2026-01-01 00:00:00 | INFO | train_inner | epoch 001:     50 / 2043 loss=14.1, ppl=17000.5, num_updates=50, lr=1e-05\n"
    "... | INFO | valid | epoch 001 | valid on 'valid' subset | loss 8.5 | ppl 362.04 | wps 0 | num_updates 60 | best_loss 8.5\n"
    "... | INFO | train | epoch 001 | loss 9 | ppl 512 | num_updates 60 | lr 1e-05\n"
)
HYDRA = {
    "json": (
        '[2026-11-28 12:00:00,123][train_inner][INFO] - {"epoch": 1, "loss": "9", "num_updates": "1"}\n'
        "[2026-11-28 12:00:00,124][fairseq.trainer][INFO] - begin training epoch 2\n"
        '[2026-11-28 12:00:00,125][valid][INFO] - {"epoch": 1, "valid_loss": "8.5", "valid_num_updates": "2"}\n'
        '[2026-11-28 12:00:00,126][train][INFO] - {"epoch": 1, "train_loss": "8.75", "train_num_updates": "2"}\n'
    ),
    "simple": (
        "[2026-11-28 12:00:00,123][train_inner][INFO] - epoch 001:      1 / 2 loss=9, ppl=512, wps=574, num_updates=1, wall=14\n"
        "[2026-11-28 12:00:00,124][fairseq.trainer][INFO] - begin training epoch 2\n"
        "[2026-11-28 12:00:00,125][valid][INFO] - epoch 001 | valid on 'valid' subset | loss 8.5 | wps 0 | num_updates 2\n"
        "[2026-11-28 12:00:00,126][train][INFO] - epoch 001 | loss 8.75 | ppl 430.54 | num_updates 2 | lr 8e-05 | wall 14\n"
    ),
}
PAGE = """# Page

| option | |
|---|---|
| a | b |

| row of the recipe | | test perplexity, context 0 | numbers kept of a text |
|---|---|---:|---:|
| `delta_elu` | delta | 228.88 | 8,192 |
| `softmax` | | 253.04 | 262,144, grows |

| row | test perplexity | numbers kept |
|---|---|---|
| later | 1 | 1 |
"""
CONVERTED = """| row of the recipe | converted | of the softmax row's performance |
|---|---:|---:|
| `softmax` | 221.47 | 100.0% |
| `decay-4` | 624.31 | 70.1% |
| `decay-16` | 448.19 | 77.1% |
| `decay-16-distilled` | 448.19 | 82.2% |
| `gated_delta-4` | | |
| `gated_delta-16` | 359.00 | 71.0% |
"""
PROBES = "delta_elu 16 100\ndelta_elu 32 99.5\nsum_elu 16 41.25\nkda-w64-negative 32 7\ndelta_product-4-negative 16 9\n"
LENGTH = (
    "delta_elu-stream 0.1 1 256 80 80\ndelta_elu-stream 0.1 1 512 60 75\ndelta_elu-stream 0.1 2 256 82 82\n"
    "delta_elu-stream 0.1 2 512 90 100\ndecay-stream 0.1 1 256 84 84\ndecay-stream 0.1 1 512 210 70\n"
)
POSITION = (
    "softmax 0.1 1 1 80\nsoftmax 0.1 1 2 60\nsoftmax 0.1 1 4 50\nsoftmax 0.1 2 1 82\nsoftmax 0.1 2 2 61\nsoftmax 0.1 2 4 50\n"
    "sum_elu 0.1 1 1 81\nsum_elu 0.1 1 2 70\n"
)
TRANSLATED = (
    "linear 0.1 1 test 37 37.5\nsoftmax 0.1 1 test 38 38.5\nsoftmax 0.1 1 test1 31 31.5\nsoftmax 0.1 2 test 39 39.5\n"
    "softmax 0.1 2 test1 32 32.5\n"
)
CONVERGED = "softmax 0.1 1 40 39 -\nsum_elu 0.1 1 44 45 -\nsoftmax 0.1 2 40.5 39.5 -\ndelta_elu-stream 0.1 1 38 37 36\n"
PARTS = (
    "sum_elu 1 258 260\nkda 1 205 203\nsum_elu 2 259 262\nsum_elu-conv 1 233.04 231\nkda-parts 1 217 215\nkda-parts 2 219.5 214\n"
)
MODELS = ("fast_weight_lm delta", "fast_weight_lm sru", "fast_weight_lm abc", "transformer_lm")
NO_LOG = "has no metric of any update; it must be a log of fairseq-train with --log-format json or simple"
REPORT = {
    "generation": [{"context": t, "name": n, "seconds": t * 1e-6, "state_bytes": 100 * t} for n in MODELS for t in (8, 64)],
    "training": [{"tokens": t, "name": n, "tokens_per_second": 1e5 / t} for n in MODELS for t in (8, 64)],
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    texts = {
        "capacity.txt": RESULTS,
        "updates.txt": UPDATES,
        "a.log": LOG,
        "simple.log": SIMPLE,
        "page.md": PAGE,
        "converted.md": CONVERTED,
        "probes.txt": PROBES,
        "parts.txt": PARTS,
        "length.txt": LENGTH,
        "position.txt": POSITION,
        "translated.txt": TRANSLATED,
        "converged.txt": CONVERGED,
        "other.txt": "kda 1 2 3\nkda-part 1 2 3\n",
        "empty.txt": "",
    }
    texts |= dict.fromkeys(("setting2-20-gated_delta-dpfp_--dpfp-nu_1.log", "setting2-20-fwm-tanh_.log"), LOG)
    for name, text in (texts | {"report.json": json.dumps(REPORT)}).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command, words",
    [
        ("capacity capacity.txt --published", ["linear (ELU)", "DPFP-1", "published (hollow)"]),
        ("updates updates.txt", ["delta, DPFP-1", "other, map"]),
        ("recall probes.txt", [">delta elu<", ">sum elu<", "pairs", "right answers (%)"]),
        ("tracking probes.txt", [">negative eigenvalues<", "elements"]),
        ("curves a.log", [">a<", "evaluation loss"]),
        ("curves json=a.log other=simple.log --log-axis --log-updates", [">json<", ">other<", "updates"]),
        ("curves setting2-20-gated_delta-dpfp_--dpfp-nu_1.log setting2-20-fwm-tanh_.log", [">FWM, tanh<", ">gated delta, DPFP-1<"]),
        ("generation report.json", [">delta<", ">softmax<", "ms per token", "state, MB"]),
        ("training report.json", [">abc<", ">sru<", "tokens/s"]),
        ("conversion converted.md", [">gated delta<", ">decay<", ">decay, distilled<", "% of softmax"]),
        ("dpfp", [">0.5<"]),
        ("state page.md", ["delta elu", "softmax", "numbers kept"]),
        ("parts parts.txt", [">sum elu<", ">no parts<", ">short convolution<", ">all three<", ">test perplexity<"]),
        ("length length.txt", [">delta elu-stream<", ">decay-stream<", ">words read<", ">perplexity, stream / segments<"]),
        ("position position.txt", [">softmax<", ">sum elu<", ">place in the segment<", ">test perplexity<"]),
        ("translated translated.txt", [">softmax<", ">linear<", ">test<", ">test1<", ">detokenised BLEU<"]),
        ("converged converged.txt", [">delta elu-stream<", ">softmax<", ">segments<", ">sliding<", ">one stream<"]),
        ("parts parts.txt --sliding", [">test perplexity, sliding<"]),
    ],
)
def test_figures(command, words, files):
    plots.main([*command.split(), "--out", "x.svg"])
    svg = (files / "x.svg").read_text()
    assert all(word in svg for word in words) and "later" not in svg
    plots.main([*command.split(), "--out", "y.svg"])
    assert (files / "y.svg").read_text() == svg


@pytest.mark.parametrize("given", [[], ["--log-axis"], ["--log-updates"]])
def test_axes_are_logarithmic_if_asked_for(given, files, monkeypatch):
    figures = []
    monkeypatch.setattr("fw_fairseq.tools.plot.__main__.save", lambda figure, paths: figures.append(figure))
    plots.main(["curves", "a.log", *given, "--out", "x.svg"])
    scales = {"--log-axis": figures[0].axes[0].get_yscale(), "--log-updates": figures[0].axes[0].get_xscale()}
    assert scales == {name: "log" if name in given else "linear" for name in scales}


def test_losses_of_updates_span_many_sizes(files):
    """Its axis is logarithmic, with a line where a task counts as solved; that of the capacity has neither."""
    for command, scale in (("updates", "log"), ("capacity", "linear")):
        axes = retrieval.draw(SimpleNamespace(command=command, results=files / f"{command}.txt", published=False)).axes[0]
        levels = [line for line in axes.lines if set(line.get_ydata()) == {SOLVED}]
        assert axes.get_yscale() == scale and len(levels) == (command == "updates")


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line."""
    return {line.get_label(): [*zip(*map(list, line.get_data()))] for line in axes.lines}


@pytest.mark.parametrize("name", cost.FIGURES)
def test_every_number_of_a_report_is_drawn(name):
    what = cost.FIGURES[name]
    figure = cost.draw_report(REPORT, name)
    panels = [panel for panel in what.panels if panel.key in REPORT[name][0]]
    assert len(figure.axes) == len(panels) and figure.axes[-1].get_xlabel() == what.label
    for axes, panel in zip(figure.axes, panels):
        wanted = {
            model: [(row[what.length], row[panel.key] * panel.factor) for row in REPORT[name] if row["name"] == model]
            for model in MODELS
        }
        assert drawn(axes) == wanted and axes.get_ylabel() == panel.label
        assert axes.get_xscale() == axes.get_yscale() == "log" and axes.get_xticks().tolist() == [8, 64]


def test_what_a_report_does_not_have_is_not_drawn():
    """A time or a size that was not measured or is 0, which a logarithmic axis has no place for."""
    rows = [{"context": t, "name": name, "seconds": t} for name in ("a", "b") for t in (1, 8)]
    rows[0] |= {"state_bytes": 0}
    rows[1] |= {"state_bytes": 1}
    times, sizes = cost.draw_report({"generation": rows}, "generation").axes
    assert drawn(times) == {name: [(1, 1000), (8, 8000)] for name in ("a", "b")} and drawn(sizes) == {"a": [(8, 1e-6)]}


def test_a_token_of_large_models_has_a_panel_for_each_size():
    """With the fewest threads of the report."""
    sizes, names, lengths = ("110M", "3.9B"), ("dense", "+ sparse loss"), (1, 512)
    tokens = [
        {"size": size, "name": name, "context": t, "threads": threads, "seconds": threads * t * (1 + i) / (1 + j)}
        for i, size in enumerate(sizes) for j, name in enumerate(names) for t in lengths for threads in (2, 1)
    ]  # fmt: skip
    figure = cost.draw_sizes({"tokens": tokens})
    assert [axes.get_ylabel() for axes in figure.axes] == ["110M, ms per token", "3.9B, ms per token"]
    for i, axes in enumerate(figure.axes):
        assert drawn(axes) == {name: [(t, 1e3 * t * (1 + i) / (1 + j)) for t in lengths] for j, name in enumerate(names)}
        assert axes.get_xscale() == axes.get_yscale() == "log" and axes.get_xticks().tolist() == [1, 512]
        assert {text.get_text() for text in axes.texts} == {*names}
    assert figure.axes[-1].get_xlabel() == "tokens before"


def test_results_and_published_losses_are_drawn(files):
    args = SimpleNamespace(command="capacity", results=files / "capacity.txt", published=True)
    lines = retrieval.draw(args).axes[0].lines
    points = [[*zip(*map(list, line.get_data()))] for line in lines]
    assert [(20, 0.0008), (40, 0.2)] in points and [(20, 0.001), (40, 0.3)] in points
    losses = read_losses("capacity")
    assert [sorted(losses[model].items()) in points for model in ("dpfp1", "elu")] == [True, True]


def test_names_beside_points_do_not_overlap(files):
    """Names of near points stand a line apart; that of a point far from them stands at its height."""
    rows = "".join(f"| m{i} | {200 if i > 5 else 100 + i / 100} | {1000 + 900 * (i % 2)} |\n" for i in range(8))
    (files / "near.md").write_text("| row | test perplexity | numbers kept |\n|---|---|---|\n" + rows)
    figure = draw_state(SimpleNamespace(page=files / "near.md"))
    axes = figure.axes[0]
    figure.draw_without_rendering()
    for side in ("left", "right"):
        heights = sorted(axes.transData.transform((1, text.get_position()[1]))[1] for text in axes.texts if text.get_ha() == side)
        *near, far = ((b - a) * 72 / figure.dpi for a, b in zip(heights, heights[1:]))
        assert len(near) == 2 and all(SMALL < gap < 1.5 * SMALL for gap in near) and far > 10 * SMALL


def test_a_line_leads_from_the_middle_of_a_name_to_its_point(files):
    """Between the name and the line matplotlib leaves two typographical points."""
    figure = draw_state(SimpleNamespace(page=files / "page.md"))
    axes, size = figure.axes[0], 72 / figure.dpi
    figure.draw_without_rendering()
    assert sorted(text.get_ha() for text in axes.texts) == ["left", "right"]
    for text in axes.texts:
        name, leader = Text.get_window_extent(text), text.arrow_patch.get_path().vertices
        side = name.x1 if text.get_ha() == "right" else name.x0
        assert 2 < abs(leader[0][0] - side) * size < 2.75 and abs(leader[0][1] - (name.y0 + name.y1) / 2) < 1
        assert abs(leader[-1] - axes.transData.transform(text.xy)).max() * size < 3


@pytest.mark.parametrize("name", ["generation", "conversion"])
def test_names_of_lines_stand_between_the_axes_and_the_edge(name, files):
    figure = cost.draw_report(REPORT, name) if name in REPORT else draw_conversion(SimpleNamespace(page=files / "converted.md"))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        assert len(boxes) == len(axes.lines) > 2
        assert all(axes.bbox.x1 < box.x0 and box.x1 < figure.bbox.x1 for box in boxes)


@pytest.mark.parametrize("name, narrower", [("delta", False), ("gated_delta_with_a_long_name", True)])
def test_the_axes_leave_room_for_the_longest_name(name, narrower, tmp_path):
    lines = [f"{row} 0.1 1 {words} {words} {words + 1}" for row in ("sum", name) for words in (256, 512, 1024)]
    (tmp_path / "length.txt").write_text("\n".join(lines))
    figure = draw_length(SimpleNamespace(results=tmp_path / "length.txt"))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert len(boxes) == 2 and all(axes.bbox.x1 < box.x0 and box.x1 <= figure.bbox.x1 + 0.01 for box in boxes)
    assert bool(axes.get_position().x1 < 0.7) is narrower


def test_the_surfaces_of_dpfp():
    """At each point one feature at most is above 0, the product of the coordinates' sizes (Schlag et al. 2021, figure 1)."""
    points, features = surfaces()
    assert [tuple(points[y, x]) for y in (0, -1) for x in (0, -1)] == [(-1, -1), (1, -1), (-1, 1), (1, 1)]
    assert ((features > 0).sum(-1) <= 1).all() and features.shape[-1] == 4
    assert points[:, len(points) // 2, 0].abs().max() < 1e-15, "the axes are on the grid"
    assert torch.equal(features.sum(-1), points.abs().prod(-1))
    corners = [features[y, x].argmax().item() for y in (0, -1) for x in (0, -1)]
    assert len(set(corners)) == 4


def test_endings(files, capsys):
    pyplot.close("all")
    plots.main(["capacity", "capacity.txt", "--out", "x.png", "x.pdf"])
    assert (files / "x.png").read_bytes().startswith(b"\x89PNG") and (files / "x.pdf").read_bytes().startswith(b"%PDF")
    assert capsys.readouterr().out.split() == ["x.png", "x.pdf"] and not list(files.glob(".*"))
    assert not pyplot.get_fignums(), "matplotlib keeps figures until they are closed"


def test_logs_are_read_by_metric(files):
    assert read_log(files / "a.log", "valid_loss") == {1: 8.5, 2: 7.5}
    assert read_log(files / "a.log", "loss") == {1: 9.0}
    assert read_log(files / "simple.log", "valid_ppl") == {60: 362.04}
    assert read_log(files / "simple.log", "train_ppl") == {60: 512.0}
    assert read_log(files / "simple.log", "ppl") == {50: 17000.5}
    (files / "bare.log").write_text('{"valid_loss": "8.5", "valid_num_updates": "1"}\n["valid_loss"]\n{"valid_loss": "2"}\n')
    assert read_log(files / "bare.log", "valid_loss") == {1: 8.5}, "of a line of which no update is known, nothing"


@pytest.mark.parametrize("form", HYDRA)
def test_logs_of_hydra_are_read(form, tmp_path):
    (tmp_path / "hydra_train.log").write_text(HYDRA[form])
    found = {metric: read_log(tmp_path / "hydra_train.log", metric) for metric in ("loss", "valid_loss", "train_loss")}
    assert found == {"loss": {1: 9.0}, "valid_loss": {2: 8.5}, "train_loss": {2: 8.75}}


def test_a_run_of_one_epoch_has_more_than_one_point(tmp_path):
    lines = [f'| {{"epoch": 1, "loss": "{9 - n}", "num_updates": "{50 * n}"}}' for n in (1, 2, 3)]
    lines.append('| {"epoch": 1, "train_loss": "7.5", "train_num_updates": "160"}')
    (tmp_path / "short.log").write_text("\n".join(lines))
    short, two, epochs = (tmp_path / f"{name}.log" for name in ("short", "two", "epochs"))
    within = {50: 8.0, 100: 7.0, 150: 6.0}
    assert read_logs([short], "train_loss") == ([within], "loss")
    lines.append('| {"epoch": 2, "train_loss": "6.5", "train_num_updates": "320"}')
    two.write_text("\n".join(lines))
    assert read_logs([two], "train_loss") == ([{160: 7.5, 320: 6.5}], "train_loss"), "a point of each epoch"
    assert read_logs([two, short], "train_loss") == ([within, within], "loss"), "one quantity in one figure"
    epochs.write_text("\n".join(lines[3:]))
    assert read_logs([epochs, short], "train_loss") == ([{160: 7.5, 320: 6.5}, {160: 7.5}], "train_loss")


@pytest.mark.parametrize("epochs, label", [(1, "training loss within epochs"), (2, "training loss of each epoch")])
def test_the_axis_says_which_training_loss_is_drawn(epochs, label, tmp_path):
    lines = ['| {"epoch": 1, "loss": "9", "num_updates": "50"}', '| {"epoch": 1, "loss": "8", "num_updates": "100"}']
    lines += [f'| {{"epoch": {n}, "train_loss": "7.5", "train_num_updates": "{160 * n}"}}' for n in range(1, epochs + 1)]
    (tmp_path / "a.log").write_text("\n".join(lines))
    args = plots.build_parser().parse_args(["curves", str(tmp_path / "a.log"), "--metric", "train_loss", "--out", "x.svg"])
    figure = args.draw(args)
    assert figure.axes[0].get_ylabel() == label
    save(figure, [])


@pytest.mark.parametrize("values", [(0.94, 1.54), (0.3, 400.0), (11.0, 14.0)])
def test_a_logarithmic_axis_has_at_least_two_numbers(values):
    figure, [axes] = canvas()
    axes.plot(range(2), values)
    log_values(axes)
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.yaxis.get_major_locator()()) >= 2
    save(figure, [])


@pytest.mark.parametrize("high, ticks", [(99, [1, 2, 5, 10, 20, 50]), (100, [1, 10, 100])])
def test_a_logarithmic_axis_has_more_numbers_where_it_spans_less_than_two_powers_of_ten(high, ticks):
    figure, [axes] = canvas()
    axes.set_ylim(1, high)
    log_values(axes)
    assert [tick for tick in axes.get_yticks() if 1 <= tick <= high] == pytest.approx(ticks)
    save(figure, [])


def test_logs_of_retrieval_are_known():
    names = {
        "setting1-60-sum-elu_": ("capacity", "elu"), "setting1-100-sum-dpfp_--dpfp-nu_2": ("capacity", "dpfp2"),
        "setting2-20-gated_delta-favor_--favor-features_64": ("updates", "gated_delta:favor64"), "train": None,
        "setting1-60-sum-elu_--max-update_500": None,
    }  # fmt: skip
    assert {name: point_of_log(Path(f"out/{name}.log")) for name in names} == names
    point, other = (f"out/setting1-{keys}-sum-elu_.log" for keys in (60, 80))
    assert [name for name, _, _ in plots.runs([point, other])] == [Path(point).stem, Path(other).stem]
    assert [name for name, _, _ in plots.runs([point, f"mine={other}"])] == [Path(point).stem, "mine"]


def test_results_are_read_by_model(files):
    assert read_results(files / "capacity.txt") == {"dpfp1": {20: 0.0008, 40: 0.2}, "elu": {20: 0.001, 40: 0.3}}


def test_the_first_table_with_sizes_is_read(files):
    assert read_table(files / "page.md", "numbers kept", "test perplexity") == {
        "delta_elu": (8192, 228.88),
        "softmax": (262144, 253.04),
    }


def test_a_number_is_read_whole(tmp_path):
    """Or not at all: 2.5M is not 2.5."""
    rows = "| a | 5 | 1.2e5 |\n| b | 2.5M | 7 |\n| c | 3 | nan |\n| d | 1,000 | 3.5 ± 0.1 |\n"
    (tmp_path / "page.md").write_text(f"| row | numbers kept | test perplexity |\n|---|---|---|\n{rows}")
    assert read_table(tmp_path / "page.md", "numbers kept", "test perplexity") == {"a": (5, 120000), "d": (1000, 3.5)}


@pytest.mark.parametrize("text, shown", [("inf", "inf"), ("nan", "nan")])
def test_a_seed_that_diverged_is_in_the_mean(text, shown, tmp_path, capsys):
    (tmp_path / "parts.txt").write_text(f"delta 1 50 45\ndelta 2 {text} 47\n")
    plots.main(["parts", str(tmp_path / "parts.txt"), "--table"])
    assert capsys.readouterr().out.splitlines()[-1] == f"| `delta` | {shown} |"


def test_the_name_of_a_validation_set_may_have_underscores(tmp_path):
    lines = [{"valid_loss": "5", "valid_num_updates": "10"}, {"valid_long_loss": "6", "valid_long_num_updates": "12"}]
    (tmp_path / "a.log").write_text("".join(f"| INFO | valid | {json.dumps(line)}\n" for line in lines))
    assert read_log(tmp_path / "a.log", "valid_loss") == {10: 5} and read_log(tmp_path / "a.log", "valid_long_loss") == {12: 6}
    with pytest.raises(Mistake, match=r"has no ppl; --metric may be one that it has: valid_loss, valid_long_loss$"):
        read_log(tmp_path / "a.log", "ppl")


def test_results_as_a_table(files, capsys):
    plots.main(["updates", "updates.txt", "--published", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| best evaluation loss | 20 | 40 | 60 | 80 | 100 | 120 | 140 | 160 | 180 | 200 |",
        "|---" + 10 * "|---:" + "|",
        "| delta, DPFP-1 | 0.0002" + 9 * " | " + " |",
        "| delta, DPFP-1, published | 0.00077 | 0.00097 | 0.0049 | 0.0063 | 8.6e-05 | 0.014 | 0.047 | 0.1 | 0.13 | 0.17 |",
        "| other, map | 30" + 9 * " | " + " |",
    ]


def test_small_losses_have_two_digits_and_large_ones_three():
    losses = [None, 0.000123, 0.0996, 0.1, 0.1234, 1.234, 12.345]
    assert [number(loss) for loss in losses] == ["", "0.00012", "0.1", "0.1", "0.123", "1.23", "12.3"]


def test_probes_are_drawn_and_printed(files, capsys):
    """With and without negative eigenvalues in a panel each."""
    figure = probes.draw(SimpleNamespace(command="recall", results=files / "probes.txt"))
    assert {axes.get_title(loc="left"): drawn(axes) for axes in figure.axes} == {
        "without negative eigenvalues": {"delta elu": [(16, 100), (32, 99.5)], "sum elu": [(16, 41.25)]},
        "negative eigenvalues": {"kda, width 64": [(32, 7)], "delta product, 4 writes": [(16, 9)]},
    }
    plots.main(["recall", "probes.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| right answers, %, of pairs | 16 | 32 |",
        "|---|---:|---:|",
        "| delta elu | 100.0 | 99.5 |",
        "| sum elu | 41.2 |  |",
        "| kda, width 64, negative eigenvalues |  | 7.0 |",
        "| delta product, 4 writes, negative eigenvalues | 9.0 |  |",
    ]


def test_labels_are_spread_out_in_their_order():
    assert spread_out([0.5, 0.0, 0.5, 1.0], 0.1) == pytest.approx([0.45, 0.0, 0.55, 1.0])
    assert spread_out([0.5, 0.52, 0.61], 0.1) == pytest.approx([0.4433333, 0.5433333, 0.6433333])
    assert spread_out([0.0, 0.01, 1.0], 0.1, low=0.0, high=1.0) == pytest.approx([0.0, 0.1, 1.0])


def test_no_two_lines_are_alike_in_grey():
    assert len({look(i)[1:] for i in range(12)}) == 12
    assert all(look(i).linestyle == "-" or look(i).linestyle[0] == 0 for i in range(12)), "a line begins with a whole dash"


@pytest.mark.parametrize("points, every_point", [(12, True), (13, False)])
def test_many_points_have_markers_at_even_distances(points, every_point):
    figure, [axes] = canvas()
    plot(axes, look(0), "a", {x: x for x in reversed(range(points))})
    [line] = axes.lines
    assert line.get_markevery() == (1 if every_point else 0.07) and [*line.get_xdata()] == [*range(points)]
    save(figure, [])


def test_the_frame_stands_back_behind_the_lines():
    """It is open at the top and at the right; it, its ticks and the grid are much thinner than a line, and below it."""
    figure, [axes] = canvas()
    plot(axes, look(0), "a", {1: 1, 2: 2})
    [line] = axes.lines
    ticks, grid = [*axes.get_xticklines(), *axes.get_yticklines()], [*axes.get_xgridlines(), *axes.get_ygridlines()]
    assert {side for side, edge in axes.spines.items() if edge.get_visible()} == {"left", "bottom"}
    assert all(each.get_visible() for each in grid) and axes.get_axisbelow() is True
    widths = [edge.get_linewidth() for edge in (*axes.spines.values(), *grid)] + [tick.get_markeredgewidth() for tick in ticks]
    assert len(grid) > 4 < len(ticks) and 1.5 * max(widths) < line.get_linewidth()
    save(figure, [])


@pytest.mark.parametrize("length, columns", [(3, 3), (17, 2), (60, 1)])
def test_a_legend_has_as_many_columns_as_fit(length, columns):
    """At least one, also where that does not fit. The figure grows with the legend's lines."""
    figure, [axes] = canvas(2.2)
    for index in range(4):
        plot(axes, look(index), "n" * (length - 1) + str(index), {1: 1, 2: 2})
    legend(figure, axes)
    figure.draw_without_rendering()
    [drawn] = figure.legends
    boxes = [text.get_window_extent() for text in drawn.get_texts()]
    assert len(boxes) == 4 and len({round(box.x0) for box in boxes}) == columns
    lines = {3: 2, 2: 2, 1: 4}[columns]
    assert lines * SMALL < 72 * (figure.get_figheight() - 2.2) < 2 * lines * SMALL
    save(figure, [])


def test_parts_are_points_at_their_rules(files):
    """The best rule without parts is on top, each seed has its point, and a line joins the means of no parts and of all three."""
    axes = draw_parts(SimpleNamespace(results=Path("parts.txt"), sliding=False)).axes[0]
    points = drawn(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["kda", "sum elu"] and axes.yaxis_inverted()
    assert sorted(points["no parts"]) == [(205, 0), (258, 1), (259, 1)] and points["short convolution"] == [(233.04, 1)]
    assert points["all three"] == [(217, 0), (219.5, 0)] and "output norm" not in points
    joins = [[*line.get_xdata()] for line in axes.lines if line.get_linestyle() == "-"]
    assert joins == [[205, 218.25], [258.5]]


def test_table_of_parts(files, capsys):
    """Means, and standard deviations where there are several seeds."""
    plots.main(["parts", "parts.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| test perplexity, parts: | none | short convolution | all three |",
        "|---|---:|---:|---:|",
        "| `kda` | 205.0 |  | 218.2 ± 1.8 |",
        "| `sum_elu` | 258.5 ± 0.7 | 233.0 |  |",
    ]
    plots.main(["parts", "parts.txt", "--table", "--sliding"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `kda` | 203.0 |  | 214.5 ± 0.7 |", "| `sum_elu` | 261.0 ± 1.4 | 231.0 |  |",
    ]  # fmt: skip


def test_converged_models_are_points_of_seeds(files, capsys):
    """The best in segments is on top; a row without a memory has no point of one stream."""
    axes = draw_converged(SimpleNamespace(results=Path("converged.txt"))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["delta elu-stream", "softmax", "sum elu"]
    assert axes.yaxis_inverted() and drawn(axes) == {
        "segments": [(38, 0), (40, 1), (40.5, 1), (44, 2)],
        "sliding": [(37, 0), (39, 1), (39.5, 1), (45, 2)],
        "one stream": [(36, 0)],
    }
    plots.main(["converged", "converged.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| test perplexity | segments | sliding | one stream |",
        "|---|---:|---:|---:|",
        "| `delta_elu-stream` | 38.00 | 37.00 | 36.00 |",
        "| `softmax` | 40.25 ± 0.35 | 39.25 ± 0.35 |  |",
        "| `sum_elu` | 44.00 | 45.00 |  |",
    ]


def test_translated_rows_have_a_point_for_each_seed_and_test_set(files, capsys):
    """The best row comes first."""
    axes = draw_translated(SimpleNamespace(results=Path("translated.txt"))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["softmax", "linear"]
    assert drawn(axes) == {"test": [(38, 0), (39, 0), (37, 1)], "test1": [(31, 0), (32, 0)]}
    plots.main(["translated", "translated.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| detokenised BLEU | test | test1 |",
        "|---|---:|---:|",
        "| `softmax` | 38.50 ± 0.71 | 31.50 ± 0.71 |",
        "| `linear` | 37.00 |  |",
    ]


def test_rows_of_several_dropouts_say_theirs(files):
    Path("converged.txt").write_text(CONVERGED + "softmax 0.2 1 41 40 -\n")
    assert [*read_converged(Path("converged.txt"))] == [
        "delta_elu-stream, dropout 0.1",
        "softmax, dropout 0.1",
        "softmax, dropout 0.2",
        "sum_elu, dropout 0.1",
    ]
    Path("length.txt").write_text(LENGTH + "decay-stream 0.2 1 512 210 70\n")
    rows = [("delta_elu", 0.1), ("decay", 0.1), ("decay", 0.2)]
    assert [*read_length(Path("length.txt"))] == [f"{row}-stream, dropout {dropout}" for row, dropout in rows]
    Path("position.txt").write_text(POSITION + "softmax 0 1 1 90\n")
    assert [*read_position(Path("position.txt"))] == ["softmax, dropout 0.1", "sum_elu, dropout 0.1", "softmax, dropout 0"]


def test_length_is_a_share_of_the_same_words_in_segments(files, capsys):
    """A point is the mean of the seeds, and the table has their standard deviation."""
    lines = drawn(draw_length(SimpleNamespace(results=Path("length.txt"))).axes[0])
    assert lines["delta_elu-stream"] == [(256, 1), (512, pytest.approx(0.85))] and lines["decay-stream"] == [(256, 1), (512, 3)]
    plots.main(["length", "length.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| stream / segments, words to | 256 | 512 |",
        "|---|---:|---:|",
        "| `delta_elu-stream` | 1.000 ± 0.000 | 0.850 ± 0.071 |",
        "| `decay-stream` | 1.000 | 3.000 |",
    ]


def test_position_is_the_perplexity_at_each_place(files, capsys):
    """A row with fewer places than another one leaves its cells empty."""
    axes = draw_position(SimpleNamespace(results=Path("position.txt"), relative_to=None, leave_out=[])).axes[0]
    assert drawn(axes) == {"softmax": [(1, 81), (2, 60.5), (4, 50)], "sum_elu": [(1, 81), (2, 70)]}
    assert axes.get_xscale() == axes.get_yscale() == "log" and [*axes.get_xticks()] == [1, 2, 4]
    plots.main(["position", "position.txt", "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| test perplexity, words to | 1 | 2 | 4 |",
        "|---|---:|---:|---:|",
        "| `softmax` | 81.00 ± 1.41 | 60.50 ± 0.71 | 50.00 ± 0.00 |",
        "| `sum_elu` | 81.00 | 70.00 |  |",
    ]


def test_a_line_without_a_number_hides_no_other_one(tmp_path):
    """JSON has null for what was not computed; a run that was stopped may leave half a line."""
    lines = ['{"valid_num_updates": 1, "valid_loss": null}', '{"valid_num_updates": 2, "valid_loss": "3.5"}', '{"a":' * 9999]
    lines += ['{"valid_num_updates": null, "valid_loss": 1}', '{"valid_num_updates": Infinity, "valid_loss": 1}']
    (tmp_path / "a.log").write_text("\n".join([*lines, '{"valid_num_updates": 4, "valid_loss": [1]}']))
    assert read_log(tmp_path / "a.log", "valid_loss") == {2: 3.5}


def test_an_ending_that_is_no_width_is_a_number_of_writes():
    assert [*probes.panels_of({"delta-wide": {1: 2}})] == [""] and probes.title_of_ending("wide") == "wide writes"


def test_position_as_a_share_of_a_row(tmp_path, capsys, monkeypatch):
    """Of the same seed; a seed that the row has not does not count."""
    monkeypatch.chdir(tmp_path)
    rows = ["a 0.1 1 1 90", "a 0.1 1 2 40", "a 0.1 2 1 80", "a 0.1 2 2 50", "b 0.1 1 1 45", "b 0.1 2 1 60", "b 0.1 3 1 1"]
    Path("position.txt").write_text("\n".join([*rows, "b 0.1 1 2 50", "c 0.1 1 1 9", "d 0.1 3 1 9"]) + "\n")
    asked = ["position", "position.txt", "--relative-to", "a", "--leave-out", "c", "d"]
    axes = draw_position(plots.build_parser().parse_args(asked)).axes[0]
    assert drawn(axes)["b"] == [(1, pytest.approx(0.625)), (2, 1.25)] and axes.get_yscale() == "linear"
    assert axes.get_ylabel() == "test perplexity / that of a"
    plots.main([*asked, "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| test perplexity / that of a, words to | 1 | 2 |",
        "|---|---:|---:|",
        "| `b` | 0.625 ± 0.177 | 1.250 |",
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--relative-to x", "--relative-to is x, which is no row of position.txt; it has: a, b"),
        ("--leave-out a x", "--leave-out is x, which is no row of position.txt; it has: a, b"),
        ("--relative-to a", "--relative-to is a, which has no seed and dropout of b in position.txt; give --leave-out b"),
        ("--leave-out a b", "--leave-out leaves no row of position.txt to draw"),
        ("--relative-to a --leave-out b", "--leave-out leaves no row of position.txt to draw"),
    ],
)
def test_rows_that_positions_do_not_have(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("position.txt").write_text("a 0.1 1 1 90\nb 0.1 2 1 80\n")
    with pytest.raises(SystemExit, match=f"^fw-plot: {re.escape(said)}$"):
        plots.main(["position", "position.txt", *words.split(), "--out", "x.svg"])
    assert not Path("x.svg").exists()


def test_probes_of_several_widths_have_a_panel_each(tmp_path):
    """From narrow to wide, with one look for each rule; but one panel where a model names no width."""
    (tmp_path / "widths.txt").write_text("delta-w128 32 99\nkda-w128 16 100\ndelta-w64 16 98\nkda-w64 16 97\n")
    figure = probes.draw(SimpleNamespace(command="recall", results=tmp_path / "widths.txt"))
    narrow, wide = figure.axes
    assert drawn(narrow) == {"delta": [(16, 98)], "kda": [(16, 97)]} and drawn(wide) == {"delta": [(32, 99)], "kda": [(16, 100)]}
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["width 64", "width 128"]
    looks = [{line.get_label(): line.get_color() for line in axes.lines} for axes in figure.axes]
    assert looks[0] == looks[1] and len(set(looks[0].values())) == 2
    (tmp_path / "widths.txt").write_text("delta-w64 16 98\ndelta 16 97\n")
    [axes] = probes.draw(SimpleNamespace(command="recall", results=tmp_path / "widths.txt")).axes
    assert axes.get_title(loc="left") == "" and drawn(axes) == {"delta, width 64": [(16, 98)], "delta": [(16, 97)]}


@pytest.mark.parametrize(
    "command, message",
    [
        ("capacity missing.txt", "No such file or directory: 'missing.txt'"),
        ("capacity a.log", "a.log, line 1 is '2026-01-01 "),
        ("curves a.log --metric ppl", "a.log has no ppl; --metric may be one that it has: loss, valid_loss"),
        ("curves begun.log", "begun.log has no valid_loss; --metric may be one that it has: loss, ppl"),
        ("curves capacity.txt", f"capacity.txt {NO_LOG}"),
        ("curves empty.txt", f"empty.txt {NO_LOG}"),
        ("generation a.log", "a.log is not what fw-bench model --json writes"),
        ("generation zero.json", "zero.json is not what fw-bench model --json writes"),
        ("generation endless.json", "endless.json is not what fw-bench model --json writes"),
        ("generation none.json", "none.json is not what fw-bench model --json writes"),
        ("length zero.txt", "zero.txt has a line whose SEGMENTS are not above 0; perplexities are at least 1"),
        ("curves words.log", f"words.log {NO_LOG}"),
        (
            "position nothing.txt --relative-to softmax",
            "nothing.txt has a line of softmax whose perplexity is not above 0; perplexities are at least 1",
        ),
        ("state short.md", "short.md has no table with the columns row, numbers kept, test perplexity"),
        ("conversion page.md", "page.md has no table with the columns row, of the softmax row's performance"),
        ("parts probes.txt", "probes.txt, line 1 is 'delta_elu 16 100'; it must be ROW SEED PERPLEXITY SLIDING"),
        ("parts other.txt", "other.txt, line 2 has the row kda-part; its ending must be conv, norm, gate, parts or none"),
        ("length parts.txt", "parts.txt, line 1 is 'sum_elu 1 258 260'; it must be ROW DROPOUT SEED END STREAM SEGMENTS"),
        (
            "position length.txt",
            "length.txt, line 1 is 'delta_elu-stream 0.1 1 256 80 80'; it must be ROW DROPOUT SEED END PERPLEXITY",
        ),
        ("parts empty.txt", "empty.txt has no results"),
        ("state a.log", "a.log has no table with the columns row, numbers kept, test perplexity"),
    ],
)
def test_mistakes(command, message, files):
    (files / "zero.json").write_text('{"generation": [{"context": 0, "name": "x", "seconds": 1}]}')
    (files / "endless.json").write_text('{"generation": [{"context": Infinity, "name": "x", "seconds": 1}]}')
    (files / "none.json").write_text('{"generation": []}')
    (files / "zero.txt").write_text("decay-stream 0.1 1 256 80 0\n")
    (files / "nothing.txt").write_text("delta 0.1 1 100 50\nsoftmax 0.1 1 100 0\n")
    (files / "begun.log").write_text(SIMPLE.splitlines()[0].replace(", lr=1e-05", ""))
    (files / "words.log").write_text('{"valid_loss": "none", "valid_num_updates": "3"}')
    (files / "short.md").write_text("| row | numbers kept | test perplexity |\n|---|---|---|\n| softmax | 12 |\n| sum | 1.2.3 |\n")
    with pytest.raises(SystemExit, match="fw-plot: ") as exit_:
        plots.main([*command.split(), "--out", "x.svg"])
    assert message in str(exit_.value) and not (files / "x.svg").exists()


def test_logs_in_folders_with_an_equals_sign(files):
    """With a name and without one, as a folder of a sweep is often called."""
    folder = files / "lr=0.1"
    folder.mkdir()
    (folder / "train.log").write_text((files / "a.log").read_text())
    for text, name in (("lr=0.1/train.log", ""), ("x=lr=0.1/train.log", "x"), ("a=b=a.log", "a=b"), ("a=none.log", "a")):
        assert plots.split(text) == (name, Path(text.removeprefix(f"{name}=" if name else "")))
    plots.main(["curves", "delta, lr=0.1=lr=0.1/train.log", "--out", "x.svg"])
    assert ">delta, lr=0.1<" in (files / "x.svg").read_text()


@pytest.mark.parametrize("out, message", [([], "--out is missing"), (["--out", "x.gif"], "--out is x.gif; it must end in .svg")])
def test_no_file_to_write(out, message, files):
    with pytest.raises(SystemExit, match="fw-plot: ") as exit_:
        plots.main(["capacity", "capacity.txt", *out])
    assert message in str(exit_.value)


def test_without_matplotlib(files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"fw-plot: figures need matplotlib; install fw_fairseq with the extra \[plots\]"):
        plots.main(["capacity", "capacity.txt", "--out", "x.svg"])
