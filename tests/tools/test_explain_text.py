"""fw-explain: texts of every tokenizer, several tokens that read, what is expected next, and what the terminal gets."""

from __future__ import annotations

import html
import json
import logging
import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from matplotlib import pyplot
from support.checkpoints import logits, save, source

from fw_fairseq import Mistake
from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import Additive, Leap, LocalAttention, Sru, Srupp, TransformerXl
from fw_fairseq.tools.explain import __main__ as explain
from fw_fairseq.tools.explain import picture
from fw_fairseq.tools.explain.page import Shown, section, shaded, strongest
from fw_fairseq.tools.explain.picture import Band, bands_of, draw, fill, plain
from fw_fairseq.tools.explain.text import read_text
from fw_fairseq.tools.explain.weights import Part, window_of

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = "the other thing is there".split()  # noqa: SIM905


def dictionary_of(*symbols: str) -> Dictionary:
    found = Dictionary()
    for symbol in symbols:
        found.add_symbol(symbol)
    return found


def symbols(numbers, dictionary) -> list[str]:
    return [dictionary[i] for i in numbers.tolist()]


def test_bytes():
    dictionary = dictionary_of(*map(str, range(256)))
    shown, numbers = read_text("a b\né", dictionary, "bytes")
    assert shown == ["</s>", "a", "▁", "b", "↵", "\\xc3", "\\xa9"]
    assert symbols(numbers, dictionary) == ["</s>", "97", "32", "98", "</s>", "195", "169"]


def test_printable_bytes_are_shown_as_they_are():
    dictionary = dictionary_of(*map(str, range(256)))
    shown, _ = read_text("!~\x1f\x7f", dictionary, "bytes")
    assert shown[1:] == ["!", "~", "\\x1f", "\\x7f"]


def test_pieces_of_a_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.SentencePieceUnigramTokenizer()
    tokenizer.train_from_iterator(
        [" ".join(WORDS)] * 9, vocab_size=20, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = tokenizer.encode("there is the thing").tokens
    for dictionary in (dictionary_of(*pieces), dictionary_of(*map(str, range(20)))):  # as recipes/additive has it, or by number
        for name in (tmp_path, tmp_path / "tokenizer.json"):
            shown, numbers = read_text("there is the thing", dictionary, str(name))
            assert "".join(shown) == "</s>▁there▁is▁the▁thing" and len(shown) == len(pieces) + 1
            assert dictionary.unk() not in numbers.tolist()
    assert symbols(numbers, dictionary)[1:] == list(map(str, tokenizer.encode("there is the thing").ids))


def test_the_tokenizer_of_gpt2(tmp_path):
    """All bytes, the end of text and three merges."""
    pytest.importorskip("tokenizers")
    tokens = [*bytes_to_unicode().values(), "<|endoftext|>", "th", "the", "Ġthe"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    dictionary = dictionary_of(*map(str, range(260)))
    shown, numbers = read_text("the other the\n", dictionary, str(tmp_path))
    assert shown == ["</s>", "the", "▁", "o", "the", "r", "▁the"]
    assert symbols(numbers, dictionary)[1:] == ["258", "220", "78", "258", "81", "259"]  # of bytes and of its merges


def test_special_tokens_are_shown_by_their_names(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer({"a": 0, "Ġ": 1, "Ċ": 2}, [])
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shown, numbers = read_text("a <|end|>\na", dictionary_of("0", "1", "2", "3"), str(tmp_path))
    assert shown == ["</s>", "a", "▁", "<|end|>", "↵", "a"] and numbers.tolist() == [2, 4, 5, 7, 6, 4]


def test_codes_of_subword_nmt(tmp_path):
    pytest.importorskip("subword_nmt")
    (tmp_path / "codes").write_text("#version: 0.2\nt h\nth e</w>\n")
    dictionary = dictionary_of("the", "th@@", "m")
    shown, numbers = read_text("the them", dictionary, str(tmp_path / "codes"))
    assert shown == ["</s>", "the", "th@@", "e@@?", "m"]
    assert symbols(numbers, dictionary) == ["</s>", "the", "th@@", "<unk>", "m"]


def test_a_sentencepiece_model(tmp_path, monkeypatch):
    """The library's interface, with a model that cuts at spaces."""
    (tmp_path / "bpe.model").write_bytes(b"")

    class Processor:
        def __init__(self, model_file):
            assert model_file == str(tmp_path / "bpe.model")

        def encode(self, text, out_type):
            return [f"▁{word}" if out_type is str else 7 for word in text.split()]

    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Processor))
    shown, numbers = read_text("a b", dictionary_of("▁a", "▁b"), str(tmp_path / "bpe.model"))
    assert shown == ["</s>", "▁a", "▁b"] and numbers.tolist() == [2, 4, 5]


def test_a_text_is_read_as_other_files_are(tmp_path):
    """Without a byte-order mark; another encoding is refused as by every command, and no download is asked for."""
    (tmp_path / "marked").write_bytes("\ufeffthe other\n".encode())
    assert read_text(str(tmp_path / "marked"), dictionary_of(*WORDS))[0] == ["</s>", "the", "other"]
    (tmp_path / "latin").write_bytes("größer".encode("latin-1"))
    with pytest.raises(Mistake, match=rf"^{tmp_path}/latin is not a file with a sentence, as it is no text in UTF-8$"):
        read_text(str(tmp_path / "latin"), dictionary_of())


def test_refused_tokenizers(tmp_path, monkeypatch):
    """In one line, with what the library says, if it says anything."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "codes").write_text("#version: 0.2\nt h e s\n")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_text("")
    end = "; name a file or folder, or 'bytes'"
    for name, said in (("empty", ".+"), ("missing", ".*No such file.+"), ("damaged.json", ".+"), ("a.model", ".+"), ("codes", "")):
        why = rf" \({said}\)" if said else ""
        with pytest.raises(ValueError, match=rf"^--tokenizer .*{name} cannot be read as a tokenizer{why}{end}$"):
            read_text("a", dictionary_of(), str(tmp_path / name))


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    model, _, state = source("--arch transformer_lm", tmp_path)
    return model, str(save(state, tmp_path)), tmp_path


def test_several_readers_and_the_words_expected_next(checkpoint, capsys):
    model, path, folder = checkpoint
    explain.main([path, "the other thing is", "--last", "2,4", "--data", str(folder), "--html", str(folder / "page.html")])
    page = (folder / "page.html").read_text()
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    chances = logits(model, torch.tensor([[2, 4, 5, 6, 7]])).softmax(-1)[0]
    for reader, word in ((2, "other"), (4, "is")):
        best = chances[reader].sort(descending=True)
        names = [f"{dictionary[i]} {100 * chance:.2g}%" for i, chance in zip(best.indices[:5].tolist(), best.values.tolist())]
        expected = ", ".join(names).replace("<", "&lt;").replace(">", "&gt;")
        assert f"<h1>What “{word}” ({reader}) reads</h1>\n<p>expected next: {expected}</p>" in page
    assert page.count("<h2>") == 2 * 2 and "linear-gradient" in page and "Each row has a scale of its own" in page
    assert capsys.readouterr().err == ""
    explain.main([path, "the other thing is", "--last", "2,4", "--data", str(folder), "--png", str(folder / "both.png")])
    explain.main([path, "the other thing is", "--last", "4", "--data", str(folder), "--png", str(folder / "one.png")])
    assert (folder / "both.png").stat().st_size > (folder / "one.png").stat().st_size


@pytest.mark.parametrize("options, start", [("", "</s>"), ("--add-bos-token", "<s>")])
def test_a_text_begins_as_those_of_fairseq(options, start, tmp_path, monkeypatch):
    """What the model reads is what the task makes of a text to generate from; the page shows its first symbol."""
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    _, args, state = source(f"--arch fast_weight_lm {options}", tmp_path)
    read, weights = [], explain.explain
    monkeypatch.setattr(explain, "explain", lambda model, tokens, readers: read.append(tokens) or weights(model, tokens, readers))
    given = ["--data", str(tmp_path), "--html", str(tmp_path / "page.html")]
    explain.main([str(save(state, tmp_path)), "the other thing", *given])
    [text] = tasks.setup_task(args).build_dataset_for_inference([torch.tensor([4, 5, 6])], [3])
    assert read[0].tolist() == text["net_input.src_tokens"].tolist()
    assert re.search(f'title="0: [^"]*">{html.escape(start)}</span>', (tmp_path / "page.html").read_text())
    with pytest.raises(SystemExit, match=f"^fw-explain: TEXT has 41 tokens, {start} included; the model takes at most 32$"):
        explain.main([str(tmp_path / "source.pt"), "the " * 40, *given])


def test_texts_as_long_as_the_model_takes(checkpoint):
    """32 tokens, </s> among them; those after the last one that reads do not count. The first that may read is word 1."""
    _, path, folder = checkpoint
    rest, page = ["--data", str(folder), "--html", str(folder / "page.html")], folder / "page.html"
    for words, last in ((31, []), (40, ["--last", "31"])):
        explain.main([path, "the " * words, *last, *rest])
        assert "What “the” (31) reads" in page.read_text()
        assert f"<title>fw-explain: {folder.name}/source.pt</title>" in page.read_text()
    for words, last, said in (
        (32, [], "TEXT has 33 tokens, </s> included; the model takes at most 32"),
        (40, ["--last", "32"], "TEXT has 33 tokens, </s> included; the model takes at most 32"),
        (2, ["--last", "0"], "--last is 0; TEXT has tokens 1 to 2"),
        (2, ["--last", "2,-1"], "--last is -1; TEXT has tokens 1 to 2"),
    ):
        with pytest.raises(SystemExit, match=f"^fw-explain: {said}$"):
            explain.main([path, "the " * words, *last, *rest])


@pytest.mark.parametrize(
    "text, unknown", [("the zzz other", None), ("the zzz other", "bytes"), ("x y the", None), ("the zzz", None)]
)
def test_a_warning_when_most_words_are_unknown(checkpoint, capsys, text, unknown):
    _, path, folder = checkpoint
    options = ["--tokenizer", unknown] if unknown else []
    explain.main([path, text, "--data", str(folder), "--html", str(folder / "page.html"), *options])
    warned = capsys.readouterr().err
    count = "13 of 13" if unknown else "2 of 3" if text == "x y the" else None
    assert (
        warned == "" if count is None else f"{count} words are not in the model's dictionary" in warned and "--tokenizer" in warned
    )


def test_a_text_that_is_no_text_is_refused(checkpoint, tmp_path, monkeypatch):
    """A folder, and a name of a file that is not there; but a file may hold one word that is not known."""
    _, path, folder = checkpoint
    monkeypatch.chdir(tmp_path)
    for name in ("texts", "the"):
        (tmp_path / name).mkdir()
    (tmp_path / "one.txt").write_text("zzz")
    options = ["--data", str(folder), "--html", "page.html"]
    for text, said in (
        ("texts", "texts, which is neither a file nor a word of the dictionary; give"),
        ("on.txt", "on.txt, which is neither a file nor a word of the dictionary; give"),
    ):
        with pytest.raises(SystemExit, match=f"^fw-explain: TEXT is {said} a sentence, or a file with one$"):
            explain.main([path, text, *options])
    assert not (tmp_path / "page.html").exists()
    for text in ("the", "one.txt"):
        explain.main([path, text, *options])
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name, said", [("none", ".Errno 2. No such file or directory: .*none.*"),
                                        ("torch", r"--user-dir .*torch cannot be imported \(Failed to import .*\)")])  # fmt: skip
def test_a_user_directory_that_cannot_be_imported_is_refused(checkpoint, name, said):
    """One that is not there, and one with the name of another package."""
    _, path, folder = checkpoint
    (folder / "torch").mkdir()
    asked = ["--data", str(folder), "--html", str(folder / "page.html"), "--user-dir", str(folder / name)]
    with pytest.raises(SystemExit, match=f"^fw-explain: {said}$"):
        explain.main([path, "the", *asked])
    assert not (folder / "page.html").exists()


def test_a_text_from_a_pipe(checkpoint, tmp_path):
    """As of ``fw-explain model.pt <(command)``."""
    _, path, folder = checkpoint
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=pipe.write_text, args=("the other thing",))
    writing.start()
    explain.main([path, str(pipe), "--data", str(folder), "--html", str(tmp_path / "page.html")])
    writing.join()
    assert all(word in (tmp_path / "page.html").read_text() for word in ("the", "other", "thing"))


def test_the_terminal_stays_quiet(checkpoint, monkeypatch):
    """The first import of fairseq makes every library log all that it does."""
    _, path, folder = checkpoint
    root, load = logging.getLogger(), explain.load_language_model
    level = root.level

    def first_import(*args):
        found = load(*args)
        root.setLevel(logging.DEBUG)
        return found

    monkeypatch.setattr(explain, "load_language_model", first_import)
    try:
        explain.main([path, "the", "--data", str(folder), "--html", str(folder / "page.html")])
        assert root.level == logging.WARNING
    finally:
        root.setLevel(level)


def test_nothing_that_is_read_is_written_over(checkpoint, capsys):
    _, path, folder = checkpoint
    (folder / "codes").write_text("#version: 0.2\n")
    before = (folder / "source.pt").read_bytes()
    for options, message in (
        (["--html", path], "--html is .*source.pt, which is CHECKPOINT too"),
        (
            ["--html", f"{folder}/page.html", "--png", f"{folder}/../{folder.name}/page.html"],
            "--png is .*page.html, which is --html too",
        ),
        (["--html", f"{folder}/codes", "--tokenizer", f"{folder}/codes"], "--html is .*codes, which is --tokenizer too"),
    ):
        with pytest.raises(SystemExit, match=f"fw-explain: {message}; name another file"):
            explain.main([path, "the", "--data", str(folder), *options])
    assert (folder / "source.pt").read_bytes() == before


def test_outside_the_window_is_not_about_zero():
    part = Part(1, "additive", "query pooling", torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.5]]), 4)
    assert part.outside() == 2 and part._replace(window=0).outside() == part._replace(window=9).outside() == 0
    assert Part(1, "softmax", "attention", part.heads).outside() == 0
    cells = shaded(list("abcdef"), part.sizes(), part.sizes(), part.outside()).split("</span>")
    assert ["class=outside" in cell for cell in cells[:6]] == [True, True, False, False, False, False]
    assert 'title="1: outside the window"' in cells[1] and 'title="2: 0"' in cells[2]


def test_windows_of_the_mixers():
    """Every token before the window has no weight, and the first one in it has."""
    config = FastWeightConfig(local_window=8, srupp_memory=7, srupp_heads=2)
    segments = [  # the last of 30 tokens is the second of its segment
        TransformerXl(16, 2, xl_memory=6, xl_segment=4),
        Srupp(16, 1, srupp_memory=6, srupp_segment=4),
    ]
    pooled = [kind(16, 2, config, 8) for kind in (Additive, Leap)]
    for mixer in (*pooled, LocalAttention(16, 2, config), Srupp(16, 1, config), *segments):
        for what, heads in mixer.explain(torch.randn(30, 1, 16)).items():
            if window := window_of(mixer, what, 30):
                assert window == 8 and heads[:, :-8].eq(0).all() and heads[:, -8].gt(0).all()
            else:
                assert what in ("memory", "write")
    assert window_of(Sru(16, 1, config), "memory", 30) == 0


def test_the_picture_of_a_piece_of_text():
    """Each cell lies around its word and its row; what lies before the window is hatched; a thin line is above a new part."""
    axis = pyplot.figure().add_subplot()
    image = fill(axis, Band("", ["a", "b", "c"], ["mean", "head 1"], [[0.0, 0.5, -1.0], [1.0, 0.0, 0.0]], [1], [0, 2]), columns=5)
    assert image.get_extent() == [-0.5, 2.5, 1.5, -0.5] and axis.get_xlim() == (-0.5, 4.5)
    assert image.get_array().tolist() == [[0.0, 0.5, -1.0], [1.0, 0.0, 0.0]] and image.get_clim() == (-1, 1)
    [hatched] = axis.patches
    assert hatched.get_bbox().bounds == (-0.5, 0.5, 2.0, 1.0)
    [border] = axis.collections
    assert [line.tolist() for line in border.get_segments()] == [[[-0.5, 0.5], [2.5, 0.5]]]
    assert border.get_linewidth()[0] < axis.spines["left"].get_linewidth()
    assert [text.get_text() for text in axis.get_yticklabels()] == ["mean", "head 1"]
    pyplot.close("all")


def test_words_are_shaded_by_their_weights():
    """White letters stand on dark ground only."""
    shades, weights = torch.tensor([0.5, 0.6, -0.75, 0.0], dtype=torch.float64), torch.tensor([0.12345, 2.0, -3.0, 0.0])
    blue, red = "31,119,180", "214,39,40"
    assert shaded(list("a<bc"), shades, weights, 0) == (
        f'<span style="background:rgba({blue},0.50)" title="0: 0.123">a</span> '
        f'<span style="background:rgba({blue},0.60)" title="1: 2">&lt;</span> '
        f'<span style="background:rgba({red},0.75);color:#fff" title="2: -3">b</span> '
        f'<span style="background:rgba({blue},0.00)" title="3: 0">c</span>'
    )


def test_the_strongest_tokens_are_named_by_the_size_of_their_weights():
    weights = torch.tensor([0.1, -0.9, 0.5, 0.0, 0.3, -0.2, 0.25])
    assert strongest(list("abcdefg"), weights) == "b (1) -0.9, c (2) 0.5, e (4) 0.3, g (6) 0.25, f (5) -0.2"


def test_heads_of_opposite_sign_do_not_hide_what_a_layer_reads():
    """In the page and, for a long text, in the picture: the mean of |0.3| and |-0.1| is the largest of the row."""
    part = Part(4, "fast_weight", "read", torch.tensor([[0.3, 0.0, 0.1], [-0.1, 0.0, 0.0]], dtype=torch.float64))
    assert section(["a", "b", "c"], part)[1] == (
        '<p><span style="background:rgba(84,39,143,1.00);color:#fff" title="0: 0.2">a</span> '
        '<span style="background:rgba(84,39,143,0.00)" title="1: 0">b</span> '
        '<span style="background:rgba(84,39,143,0.25)" title="2: 0.05">c</span></p>'
    )
    [row] = picture.rows_of([part], heads=False)[1]
    assert row == pytest.approx([1, 0, 0.25])


def test_a_picture_of_short_and_long_texts_has_a_colour_bar_for_each(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(picture, "write_atomically", lambda path, write: figures.append(pyplot.gcf()))
    draw("a title", [some_weights(4, 2), some_weights(41, 2)], tmp_path / "picture.png")
    short, long, _, heads, layers = figures[0].axes
    assert (short.images[0].get_clim(), long.images[0].get_clim()) == ((-1, 1), (0, 1))
    assert (heads.get_ylabel(), heads.get_ylim()) == ("weight / largest of its row", (-1, 1))
    assert (layers.get_ylabel(), layers.get_ylim()) == ("mean |weight| / largest of its row", (0, 1))
    assert short.images[0].get_cmap() != long.images[0].get_cmap()


@pytest.mark.parametrize("heads, words", [(1, "1 head,"), (2, "2 heads,")])
def test_the_heads_of_a_part_are_numbered_from_one(heads, words):
    lines = section(["a", "b"], Part(3, "delta", "read", torch.ones(heads, 2)))
    assert lines[0] == "<h2>layer 3, delta: read</h2>" and f"<summary>{words} and " in lines[2]
    assert [line[6] for line in lines if line.startswith("<p><b>")] == [str(number) for number in range(1, heads + 1)]


def test_a_long_text_continues_in_the_next_band():
    """Up to 40 words are one band, with every head; the title is over the first band, and each knows what is outside."""

    def bands(tokens, window=0):
        return bands_of(Shown(["w"] * tokens, [Part(1, "delta", "read", torch.ones(2, tokens), window)], [("next", 0.5)]))

    assert [(len(band.words), len(band.rows)) for band in bands(40)] == [(40, 2)]
    assert [(len(band.words), len(band.rows)) for band in bands(90, 30)] == [(40, 1), (40, 1), (10, 1)]
    assert [band.outside for band in bands(90, 30)] == [[40], [20], [0]] and bands(9, 4)[0].outside == [5, 5]
    assert [band.title for band in bands(90)] == ["What “w” (89) reads; expected next: next 50%", "", ""]


def test_words_in_a_picture_are_plain_and_not_too_long():
    assert plain("$x$") == r"\$x\$" and plain("a" * 60) == "a" * 60 and plain("a" * 61) == "a" * 59 + "…"


@pytest.mark.parametrize("tokens, window", [(6, 0), (30, 29)])
def test_a_picture_has_room_for_its_words_and_rows(tokens, window, tmp_path, monkeypatch):
    """Cells are at least as large as letters and not much larger, words stand above them, and nothing is cut off."""
    figures = []
    monkeypatch.setattr(picture, "write_atomically", lambda path, write: figures.append(pyplot.gcf()))
    shown = Shown(["word"] * tokens, [Part(1, "delta", "read", torch.randn(4, tokens), window)], [("next", 0.5)])
    draw("a title", [shown], tmp_path / "picture.png")
    [figure] = figures
    assert not pyplot.fignum_exists(figure.number) and figure.get_suptitle() == "a title"
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["outside the window"] * bool(window)
    figure.draw_without_rendering()
    axis, bar = figure.axes
    assert bar.get_ylabel() == "weight / largest of its row" and bar.get_yticks().tolist() == [-1, 0, 1]
    point, words = figure.dpi / 72, [tick.label2 for tick in axis.xaxis.get_major_ticks()]
    assert 8 < axis.bbox.height / 4 / point < 45 and axis.bbox.width / tokens / point > 8 and figure.get_figwidth() < 13
    assert not any(spine.get_visible() for spine in axis.spines.values())
    assert [word.get_text() for word in words if word.get_visible()] == ["word"] * tokens
    assert all(word.get_window_extent().y0 >= axis.bbox.y1 for word in words)
    assert not any(tick.label1.get_visible() for tick in axis.xaxis.get_major_ticks())
    box = axis.get_tightbbox()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
    assert axis.get_title(loc="left") == f"What “word” ({tokens - 1}) reads; expected next: next 50%"


def some_weights(tokens: int, heads: int) -> Shown:
    return Shown(["word"] * tokens, [Part(layer, "delta", "read", torch.randn(heads, tokens)) for layer in (1, 2)], [("next", 0.5)])


def test_the_colour_bar_of_a_tall_picture_is_not_tall(tmp_path, monkeypatch):
    """A few centimetres."""
    figures = []
    monkeypatch.setattr(picture, "write_atomically", lambda path, write: figures.append(pyplot.gcf()))
    draw("a title", [some_weights(4, 20)], tmp_path / "picture.png")
    figures[0].draw_without_rendering()
    axis, bar = figures[0].axes
    assert 1 < bar.bbox.height / figures[0].dpi < 2.5 < axis.bbox.height / figures[0].dpi


@pytest.mark.parametrize("name, start", [("x.svg", b"<?xml"), ("x.png", b"\x89PNG"), ("x", b"\x89PNG")])
def test_the_ending_of_a_picture_decides_its_format(name, start, tmp_path):
    draw("a title", [some_weights(2, 1)], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
