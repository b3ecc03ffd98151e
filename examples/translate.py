"""Translates from Python with a trained model: best translations, how likely each word is, and alternatives.

    python examples/translate.py run bin "ein alter mann schläft" "zwei hunde rennen"

RUN is the folder of ``fairseq-train --save-dir``, with a checkpoint of fast_weight_transformer; DATA is the folder that
``fairseq-preprocess`` wrote. A model of BPE pieces also takes ``--codes``, the file of its BPE codes. Write sentences like those of
the training text: tokenised, and in lower case if that was.
"""

import argparse

import torch

from fw_fairseq.models import FastWeightTransformer


def load(run, data, checkpoint="checkpoint_best.pt", codes=None):
    """The model with its dictionaries; ``model.translate`` takes and returns text."""
    bpe = {"bpe": "subword_nmt", "bpe_codes": codes} if codes else {}
    model = FastWeightTransformer.from_pretrained(run, checkpoint, data_name_or_path=data, **bpe)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def alternatives(model, sentence, beam=4):
    """The beam's translations, best first: text, mean log-probability of a piece, and the log-probability of each piece."""
    found = []
    for hypothesis in model.generate(model.encode(sentence), beam=beam):
        pieces = [*model.tgt_dict.string(hypothesis["tokens"]).split(), "</s>"]
        each = list(zip(pieces, hypothesis["positional_scores"].tolist()))
        found.append((model.decode(hypothesis["tokens"]), hypothesis["score"].item(), each))
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("data")
    parser.add_argument("sentences", nargs="+")
    parser.add_argument("--checkpoint", default="checkpoint_best.pt")
    parser.add_argument("--codes", help="BPE codes of subword-nmt")
    parser.add_argument("--beam", type=int, default=4)
    args = parser.parse_args(arguments)
    model = load(args.run, args.data, args.checkpoint, args.codes)
    for sentence, translation in zip(args.sentences, model.translate(args.sentences, beam=args.beam)):  # all in one batch
        print(f"{sentence} -> {translation}")
    print(f"\nfor {args.sentences[0]!r}:")
    for text, score, each in alternatives(model, args.sentences[0], args.beam):
        print(f"{score:6.2f}  {text}    ({' '.join(f'{piece} {value:.2f}' for piece, value in each)})")


if __name__ == "__main__":
    main()
