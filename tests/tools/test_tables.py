"""fw-plot tables from files to files."""

from __future__ import annotations

import csv

import pytest

from fw_fairseq.tools.plot import __main__ as plots
from fw_fairseq.tools.plot import tables
from fw_fairseq.tools.plot.tables import TABLES, collect

pytestmark = pytest.mark.quick

TRAINED = (
    "... | INFO | fw_fairseq.models.fast_weight_lm | state size: 0.1311 million numbers for a sequence\n"
    '... | INFO | train_inner | {"epoch": 1, "num_updates": "100", "loss": "5"}\n'
    '... | INFO | valid | {"epoch": 1, "valid_ppl": "40.5", "valid_num_updates": "100"}\n'
    '... | INFO | valid | {"epoch": 2, "valid_ppl": "38.25", "valid_num_updates": "200"}\n'
    '... | INFO | train | {"epoch": 2, "train_num_updates": "250"}\n... {broken\n'
)
EVALUATED = "... | INFO | fairseq_cli.eval_lm | Loss (base 2): 4.9000, Perplexity: {}\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_measured_stands_beside_published(tmp_path, capsys):
    write(tmp_path / "runs/small-delta/train.log", TRAINED)
    write(tmp_path / "runs/small-delta/eval-test.log", EVALUATED.format("36.02"))
    out = [tmp_path / "t.md", tmp_path / "t.csv"]
    plots.main(["tables", "schlag2", str(tmp_path), "--out", *map(str, out)])
    assert capsys.readouterr().out.split() == [str(path) for path in out]
    head, *rows = csv.reader(out[1].open())
    assert head[3:7] == ["valid, published", "valid, measured", "test, published", "test, measured"]
    assert len(rows) == 10 and rows[2] == ["small", "Delta Network", "delta", "34.1", "", "35.5", "36.02", "250", "0.1311"]
    lines = out[0].read_text().splitlines()
    assert lines[0].startswith("Schlag et al. 2021, table 2") and lines[6] == "| " + " | ".join(rows[2]) + " |"
    assert {line.count("|") for line in lines[2:]} == {10}


@pytest.mark.parametrize(
    "line",
    [
        "... | INFO | valid | epoch 00{} | valid on 'valid' subset | loss 4.1 | ppl 8 | bleu {} | wps 9 | num_updates {}00",
        '... | INFO | valid | {{"epoch": {}, "valid_loss": "4.1", "valid_bleu": "{}", "valid_num_updates": "{}00"}}',
        "[...][valid][INFO] - epoch 00{} | valid on 'valid' subset | loss 4.1 | ppl 8 | bleu {} | wps 9 | num_updates {}00",
    ],
)
def test_bleu(line, tmp_path, capsys):
    """The best of validation, and the score that eval.sh kept."""
    scores = [(1, 20.5, 1), (2, 26.31, 2), (3, 25.0, 3)]
    write(tmp_path / "runs/dpfp2/train.log", TRAINED.split("\n")[1] + "\n" + "\n".join(line.format(*row) for row in scores))
    write(tmp_path / "runs/dpfp2/bleu-test.txt", "26.87 27.40\n")
    plots.main(["tables", "schlag1", str(tmp_path)])
    rows = capsys.readouterr().out.splitlines()
    [row] = [row for row in rows if row.startswith("| DPFP | 256 |")]
    assert row.startswith("| DPFP | 256 | 26.2 | 26.31 | 26.9 | 26.87 | ")


def test_memories_tried_in_evaluation_have_their_own_state_size(tmp_path, capsys):
    run = tmp_path / "runs/medium-transformer_xl_stream"
    write(run / "train.log", TRAINED)
    write(run / "eval-test-memory64.log", "state size: 1.049 million numbers for a sequence\n" + EVALUATED.format("30.2"))
    plots.main(["tables", "schlag4", str(tmp_path)])
    assert "| Transformer-XL | 1.05 | 29.3 |  | 30.1 | 30.2 | 250 | 1.049 |\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lines, best",
    [
        (['"nan"', '"30"'], "30.00"),
        (['"30"', '"nan"'], "30.00"),
        (["null", '"abc"', "[1]", "31"], "31.00"),
        (['"nan"'], "nan"),
        (["null"], ""),
    ],
)
def test_the_best_of_what_was_computed(lines, best, tmp_path):
    (tmp_path / "a.log").write_text("".join(f'{{"valid_ppl": {line}, "num_updates": null}}\n' for line in lines))
    assert tables.perplexity(tmp_path / "a.log") == best and tables.read_training(tmp_path / "a.log") == ("", "")


def test_the_best_of_validation(tmp_path, capsys):
    write(tmp_path / "decay-16-phi/train.log", TRAINED)
    plots.main(["tables", "mao2", str(tmp_path)])
    assert "| Decay | 16 | 16.1 | 38.25 | 250 | 0.1311 |\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    ["... | INFO | valid | epoch {} | valid on 'valid' subset | loss 5.26 | ppl {} | num_updates {}00",
     "[...][valid][INFO] - epoch {} | valid on 'valid' subset | loss 5.26 | ppl {} | num_updates {}00",
     '[...][valid][INFO] - {{"epoch": {}, "valid_ppl": "{}", "valid_num_updates": "{}00"}}'],
)  # fmt: skip
def test_logs_of_every_form_have_a_best_of_validation(line, tmp_path):
    (tmp_path / "train.log").write_text("\n".join(line.format(*row) for row in ((1, 40.5, 1), (2, 38.25, 2), (3, 39, 3))))
    assert tables.perplexity(tmp_path / "train.log") == "38.25"


@pytest.mark.parametrize("name", TABLES)
def test_each_row_fits_its_table(name):
    table = TABLES[name]
    for row in table.rows:
        assert len(row.labels) == len(table.labels) and len(row.published) == len(table.columns)
    assert len({row.labels for row in table.rows}) == len({row.run for row in table.rows}) == len(table.rows)


@pytest.mark.parametrize("column", range(2))
@pytest.mark.parametrize("row", [0, -1])
def test_one_cell_is_a_table(tmp_path, row, column):
    """Whichever it is: the first row's, the last row's, of the first column, of the last."""
    table = TABLES["mao3"]
    write(tmp_path / list(table.columns.values())[column].format(table.rows[row].run, memory=""), EVALUATED.format("21.5"))
    cells = [line[len(table.labels) :] for line in collect(table, tmp_path)[1:]]
    assert cells[row][2 * column + 1] == "21.5" and sum(line.count("21.5") for line in cells) == 1


def test_mistakes(tmp_path):
    with pytest.raises(
        SystemExit, match=r"has no finished run of this table; none of its files is there, such as .*eval/decay-64-480\.log"
    ):
        plots.main(["tables", "mao3", str(tmp_path)])
    with pytest.raises(SystemExit, match=rf"fw-plot: FOLDER is {tmp_path}/none, which is no folder; it must be OUT of the recipe"):
        plots.main(["tables", "mao3", f"{tmp_path}/none"])
    for table, file, measure in (("mao3", "eval/decay-64-0.log", "perplexity"), ("schlag1", "runs/dpfp2/train.log", "BLEU")):
        write(tmp_path / file, "... | INFO | fairseq_cli.eval_lm | loading model(s)\n")
        said = f"{tmp_path} has no finished run of this table; {tmp_path}/{file} is there and holds no {measure}"
        with pytest.raises(SystemExit, match=f"^fw-plot: {said}$"):
            plots.main(["tables", table, str(tmp_path)])
    write(tmp_path / "eval/decay-64-0.log", EVALUATED.format("21.0"))
    with pytest.raises(SystemExit, match=r"t\.txt; it must end in \.md or \.csv"):
        plots.main(["tables", "mao3", str(tmp_path), "--out", "t.txt"])
