#!/usr/bin/env bash
# The commands that wrote the files of this folder, in a folder with text/ and a link fw_fairseq to the package at commit 352997c, so
# that no path of a machine is in the files. Kept as a record; it is not run again.
export OMP_NUM_THREADS=1
fairseq-preprocess --only-source --trainpref text/train.fw --validpref text/valid.fw --destdir data
fairseq-preprocess -s fw -t bw --trainpref text/train --validpref text/valid --joined-dictionary --destdir pairs
rm data/preprocess.log pairs/preprocess.log

COMMON="--user-dir fw_fairseq --cpu --num-workers 0 --plasma-path plasma --seed 1 --optimizer adam --lr 0.01 --dropout 0
    --no-epoch-checkpoints --log-format json --log-interval 1"
SHAPE="--decoder-layers 2 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 16
    --decoder-attention-heads 2"
TIED=--share-decoder-input-output-embed
FREE=--no-token-positional-embeddings
train() { # NAME OPTIONS
    fairseq-train $COMMON --save-dir saved "${@:2}" && mv saved/checkpoint_last.pt "$1.pt" && rm -r saved
}
lm() { # NAME OPTIONS
    train "$1" data --task language_modeling --tokens-per-sample 32 --batch-size 8 --max-update 30 --no-save-optimizer-state \
        $SHAPE "${@:2}"
}

lm delta_dpfp --arch fast_weight_lm $TIED $FREE --update-rule delta --feature-map dpfp
lm decay_adaptive --arch fast_weight_lm --update-rule decay --feature-map identity --feature-norm none --adaptive-input \
    --adaptive-input-cutoff 12,20 --adaptive-softmax-cutoff 12,20 --tie-adaptive-weights --criterion adaptive_loss \
    --adaptive-input-factor 2 --adaptive-softmax-factor 2 --ddp-backend legacy_ddp
lm gated_delta_softmax --arch fast_weight_lm $TIED --mixer-pattern softmax,fast_weight --update-rule gated_delta
lm gated_relu --arch fast_weight_lm $TIED $FREE --update-rule gated --feature-map relu --feature-dim 4
lm sum_favor --arch fast_weight_lm $TIED --update-rule sum --feature-map favor --feature-norm none --attention-norm
lm fwm --arch fast_weight_lm $TIED $FREE --update-rule fwm --feature-map tanh --feature-norm none
lm additive_leap --arch additive_lm --mixer-pattern additive,leap --window-sizes 4,0
lm sru_srupp --arch sru_lm --mixer-pattern sru,srupp --sru-projection 8 --srupp-width 8 --srupp-heads 2 --srupp-memory 6
lm local_xl --arch fast_weight_lm $TIED $FREE --mixer-pattern local_attention,transformer_xl --local-window 4 --xl-memory 6
lm linformer_abc --arch fast_weight_lm $TIED --mixer-pattern linformer,abc --slots 4 --slot-positions 32

train stopped data --task stateful_language_modeling --criterion fast_weight_cross_entropy --tokens-per-sample 8 --batch-size 4 \
    --max-update 25 --arch fast_weight_lm $SHAPE $TIED $FREE --update-rule delta --feature-map dpfp
train translation pairs --task translation --arch fast_weight_transformer --feature-map dpfp --encoder-layers 1 --decoder-layers 2 \
    --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 \
    --encoder-attention-heads 2 --decoder-attention-heads 2 --share-all-embeddings --criterion label_smoothed_cross_entropy \
    --label-smoothing 0.1 --batch-size 16 --max-update 60 --no-save-optimizer-state

lm softmax --arch transformer_lm $TIED
fw-convert softmax.pt converted.pt --rule decay --feature-dim 4
rm softmax.pt
fw-export-hf gated_delta_softmax.pt exported --data data
