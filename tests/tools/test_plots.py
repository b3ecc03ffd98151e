"""fw-plot from files to files."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from fw_fairseq import Mistake
from fw_fairseq.tools.plot import __main__ as plots
from fw_fairseq.tools.plot.colours import look
from fw_fairseq.tools.plot.logs import read_log, read_logs
from fw_fairseq.tools.plot.style import SMALL, canvas, draw_lengths, label_ends, legend, log_values, plot, save

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
NO_LOG = "has no valid_loss; it must be a log of fairseq-train with --log-format json or simple, with a metric of an update"


@pytest.fixture
def files(tmp_path, monkeypatch):
    texts = {"a.log": LOG, "simple.log": SIMPLE, "empty.txt": "", "words.log": "only words\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command, words",
    [
        ("curves a.log", [">a<", "evaluation loss"]),
        ("curves json=a.log other=simple.log --log-axis --log-updates", [">json<", ">other<", "updates"]),
    ],
)
def test_figures(command, words, files):
    """Equal input makes equal files."""
    for name in ("x.svg", "y.svg"):
        plots.main([*command.split(), "--out", name])
    svg = (files / "x.svg").read_text()
    assert all(word in svg for word in words) and (files / "y.svg").read_text() == svg


def test_long_names_stand_below_the_lines(files):
    for letters, below in ((40, False), (41, True)):
        figure = plots.draw_curves(plots.runs(["n" * letters + "=a.log"]), "valid_loss")
        assert [bool(figure.legends), bool(figure.axes[0].texts)] == [below, not below]


def test_axes_are_logarithmic_if_asked_for(files):
    for given in ((False, True), (True, False)):
        [axes] = plots.draw_curves(plots.runs(["a.log"]), "valid_loss", *given).axes
        assert [axes.get_yscale(), axes.get_xscale()] == ["log" if each else "linear" for each in given]


def test_the_axis_says_which_training_loss_is_drawn(files):
    lines = ['| {"epoch": 1, "loss": "9", "num_updates": "50"}', '| {"epoch": 1, "loss": "8", "num_updates": "100"}']
    for epoch, label in ((1, "training loss within epochs"), (2, "training loss of each epoch")):
        lines.append(f'| {{"epoch": {epoch}, "train_loss": "7.5", "train_num_updates": "{160 * epoch}"}}')
        Path("b.log").write_text("\n".join(lines))
        assert plots.draw_curves(plots.runs(["b.log"]), "train_loss").axes[0].get_ylabel() == label


def test_endings(files, capsys):
    pyplot.close("all")
    plots.main(["curves", "a.log", "--out", "x.png", "x.pdf"])
    assert (files / "x.png").read_bytes().startswith(b"\x89PNG") and (files / "x.pdf").read_bytes().startswith(b"%PDF")
    assert capsys.readouterr().out.split() == ["x.png", "x.pdf"] and not list(files.glob(".*"))
    assert not pyplot.get_fignums(), "matplotlib keeps figures until they are closed"


def test_a_path_may_have_an_equals_sign(files):
    Path("lr=1.log").write_text(LOG)
    found = [(name, path.name) for name, _, path in plots.runs(["lr=1.log", "mine=lr=1.log", "other=a.log"])]
    assert found == [("lr=1", "lr=1.log"), ("mine", "lr=1.log"), ("other", "a.log")]


def drawn(axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each line."""
    return {line.get_label(): [*zip(*map(list, line.get_data()))] for line in axes.lines}


@pytest.mark.parametrize(
    "command, message",
    [
        ("curves a.log --metric ppl", "a.log has no ppl; --metric may be one that it has: loss, valid_loss"),
        ("curves empty.txt", f"empty.txt {NO_LOG}"),
        ("curves words.log", f"words.log {NO_LOG}"),
        ("curves none.log", "No such file or directory: 'none.log'"),
    ],
)
def test_mistakes(command, message, files):
    with pytest.raises(SystemExit, match=f"^fw-plot: .*{message}"):
        plots.main([*command.split(), "--out", "x.svg"])
    assert not Path("x.svg").exists()


@pytest.mark.parametrize(
    "out, message",
    [
        ("x.jpg", "--out is x.jpg; it must end in .svg, .pdf or .png"),
        ("x.svg x.svg", "--out is x.svg, which is given twice; name another file"),
        ("a.log", "--out is a.log, which is LOG too; name another file"),
        ("dir.svg", "--out is dir.svg, which is a folder; name a file"),
    ],
)
def test_files_that_cannot_be_written(out, message, files):
    Path("dir.svg").mkdir()
    with pytest.raises(SystemExit, match=message):
        plots.main(["curves", "a.log", "--out", *out.split()])
    assert Path("a.log").read_text() == LOG


def test_without_matplotlib(files, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"fw-plot: figures need matplotlib; install fw_fairseq with the extra \[plots\]"):
        plots.main(["curves", "a.log", "--out", "x.svg"])


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


def test_the_name_of_a_validation_set_may_have_underscores(tmp_path):
    lines = [{"valid_loss": "5", "valid_num_updates": "10"}, {"valid_long_loss": "6", "valid_long_num_updates": "12"}]
    (tmp_path / "a.log").write_text("".join(f"| INFO | valid | {json.dumps(line)}\n" for line in lines))
    assert read_log(tmp_path / "a.log", "valid_loss") == {10: 5} and read_log(tmp_path / "a.log", "valid_long_loss") == {12: 6}
    with pytest.raises(Mistake, match=r"has no ppl; --metric may be one that it has: valid_loss, valid_long_loss$"):
        read_log(tmp_path / "a.log", "ppl")


def test_a_line_without_a_number_hides_no_other_one(tmp_path):
    """JSON has null for what was not computed; a run that was stopped may leave half a line."""
    lines = ['{"valid_num_updates": 1, "valid_loss": null}', '{"valid_num_updates": 2, "valid_loss": "3.5"}', '{"a":' * 9999]
    lines += ['{"valid_num_updates": null, "valid_loss": 1}', '{"valid_num_updates": Infinity, "valid_loss": 1}']
    (tmp_path / "a.log").write_text("\n".join([*lines, '{"valid_num_updates": 4, "valid_loss": [1]}']))
    assert read_log(tmp_path / "a.log", "valid_loss") == {2: 3.5}


@pytest.mark.parametrize("values", [(0.94, 1.54), (0.3, 400.0), (11.0, 14.0)])
def test_a_logarithmic_axis_has_at_least_two_numbers(values):
    figure, [axes] = canvas()
    axes.plot(range(2), values)
    log_values(axes)
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.yaxis.get_major_locator()()) >= 2
    save(figure, [])


def test_names_at_the_ends_of_lines_do_not_overlap():
    figure, [axes] = canvas(2.4)
    for index, name in enumerate("abcdefgh"):
        plot(axes, look(index), name, {1: 1, 2: 1 + index / 1000, 3: 5 if name == "h" else 1})
    label_ends(axes)
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [*"abcdefgh"]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert all(axes.get_window_extent().x1 < box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert max(boxes, key=lambda box: box.y0) is boxes[-1]
    save(figure, [])


@pytest.mark.parametrize("length, columns", [(3, 3), (26, 2), (60, 1)])
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


def test_numbers_of_a_report_are_drawn_against_length():
    """A panel for each; what is 0 has no place on a logarithmic axis."""
    rows = [{"context": t, "name": name, "seconds": t, "bytes": t - 1} for name in ("a", "b") for t in (1, 8)]
    times, sizes = draw_lengths(rows, "context", [("seconds", 1e3, "ms"), ("bytes", 1, "bytes")], "tokens").axes
    assert drawn(times) == {name: [(1, 1000), (8, 8000)] for name in ("a", "b")} and drawn(sizes)["a"] == [(8, 7)]
    assert times.get_ylabel() == "ms" and sizes.get_xlabel() == "tokens"
    assert times.get_xscale() == times.get_yscale() == "log" and times.get_xticks().tolist() == [1, 8]
