#!/usr/bin/env bash
# Trains one row of tables 2 to 5: a language model on WikiText-103 from scratch.
#
# Paper:    Schlag et al. 2021, tables 2 to 5; base, large and billion are the models of Lei 2021
# Data:     OUT/bin of prepare.sh
# Hardware: two V100 in the paper; GPUS workers share the batch of 96 (small), 56 (medium) or 16 (base) segments. A checkpoint has 0.5 GB
#           (small), 1.1 GB (medium) or 2.3 GB (base), and a run two of them, three while one is written
# Time:     up to four days in the paper; not run at this size yet; recipes/README.md has estimates, and CHECK=1 measures yours
# Expected: the paper's test perplexity, by eval.sh:
#             small-   transformer 34.1   linear 38.3   delta 35.5   performer 39.6   performer_delta 37.2
#                      performer16 38.8   performer16_delta 37.0   dpfp1 38.8   dpfp1_delta 35.0   (no number: dpfp2, dpfp2_delta,
#                      performer32, performer32_delta)
#             medium-  transformer 29.6   linear 33.0   delta 31.5   performer 33.8   performer_delta 31.8
#                      delta_norm 32.1   delta_nopos_norm 31.2   delta_nopos 31.1   delta_stream 29.4   linear_stream above 260
#                      transformer_xl_stream, evaluated with XL_MEMORY: 15 (and XL_SEGMENT=1) 65.5   64 30.1   128 27.4   384 25.5
#             the same rows with _schlag, for example small-delta_schlag, are the model of the authors' code, which does not generate
#             where it has positions
#             base-    srupp 18.3 (148M parameters, evaluated with SRUPP_MEMORY=2560)   srupp5, srupp10, no published number
#             large-   srupp 17.1 (234M)   srupp5 17.3 (225M)   srupp10, no published number
#             billion- srupp 25.1 (328M)   srupp5 23.5 (465M)   on the Billion Word benchmark, SRUPP_MEMORY=96
#             small- and medium-local_attention, -abc and -linformer are comparators that these tables do not have
# Usage:    recipes/wikitext103/train.sh ROW [OPTION of fairseq-train]...     resumes from the last checkpoint of the row
#           recipes/wikitext103/train.sh small-delta
#           GPUS=2 recipes/wikitext103/train.sh small-delta
#           GPUS=2 LAUNCH="torchrun --nproc-per-node 2" recipes/wikitext103/train.sh small-delta
#           GPUS=8 srun --nodes 2 --ntasks-per-node 1 --gpus-per-node 4 recipes/wikitext103/train.sh small-delta --distributed-port 29500
#           CHECK=1 recipes/wikitext103/train.sh small-delta    20 updates: speed, memory, disk, hours
#           BATCH=48 recipes/wikitext103/train.sh small-delta   half of the batch at once, twice for each update
#           TOY=1 recipes/wikitext103/train.sh small-delta      a tiny model on the CPU, after TOY=1 prepare.sh
#           OUT=outputs/billion DATA=folder recipes/wikitext103/prepare.sh     the texts of Billion Word, for OUT=outputs/billion
#           OUT=outputs/billion recipes/wikitext103/train.sh billion-srupp
#
# small has width 128, segments of 256 tokens and 44M parameters (the paper says 40M, its code has 44.0M); medium has width 256, segments
# of 384 and 90M. Rows with _stream carry their state over from segment to segment. By default models have fairseq's norms, start, biases,
# positions and dropout; _schlag has those of the authors' code (docs/differences.md), and its 400,000 updates of medium. The paper names
# the first learning rate and the warm-up, but no schedule; this recipe takes cosine. Updates are about 120 epochs (small) and 70 (medium).
# transformer_xl_stream has the warm-up and the updates of the authors' code; token i of a segment sees the memory, as long as a segment,
# and i tokens more. base, large and billion have the model, the dropout, the start, the learning rate and the updates of the authors'
# code, with Adam for RAdam. Its segments have 768 (base) and 1024 tokens (large): --tokens-per-sample 768. PRECISION is bf16, the default
# where every GPU has it, fp32, the default elsewhere, tf32 (fp32 with faster, coarser products) or fp16. Schlag et al. 2021 do not name
# theirs; the code of Lei 2021 has fp16.
source "$(dirname "$(realpath "$0")")/../lib.sh" || exit 1
find_programs
OUT=$(output_folder wikitext103)
kinds="SIZE-NAME, for example small-delta; --help lists all"
need_row "$kinds" "$@"
row=$1 size=${1%%-*} name=${1#*-} model_of=
shift
case $name in
    *linear*_schlag | *delta*_schlag | *performer*_schlag | *dpfp*_schlag | transformer_schlag | transformer_xl_stream_schlag)
        name=${name%_schlag} model_of=_schlag
        ;;
    *_schlag) fail "ROW is $row; the ending _schlag goes with transformer, transformer_xl_stream, linear, delta, performer and dpfp" ;;
esac
need_folder "$OUT/bin" recipes/wikitext103/prepare.sh

case $size in
    small) length=256 batch=96 updates=500000 features=8 ;;
    medium) length=384 batch=56 updates=335000 features=16 ;;
    base | large) length=512 batch=16 updates=400000 features='' ;;
    billion) length=64 batch=128 updates=800000 features='' ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
arch=fast_weight_lm_wiki103_$size$model_of
[ "$size$model_of" != medium_schlag ] || updates=400000
case $size in base | large | billion) arch=srupp_lm_wiki103_base ;; esac
linear=(--update-rule sum --feature-norm none --attention-norm)
delta=(--update-rule delta --feature-norm sum)
case $size-$name in
    base-srupp | base-srupp5 | base-srupp10 | large-srupp | large-srupp5 | large-srupp10 | billion-srupp | billion-srupp5)
        memory=$(given --tokens-per-sample "$length" "$@") projection=768 drop=0.15 attention_drop=0.15 sizes=() lr=0.0003
        case $row in
            large-*) projection=744 drop=0.2 attention_drop=0.2 sizes=(--decoder-embed-dim 5952) ;;
            billion-srupp) projection=1024 drop=0.05 attention_drop=0 lr=0.0002 sizes=(--decoder-embed-dim 4096) ;;
            billion-srupp5) projection=1024 drop=0.1 attention_drop=0 lr=0.0002 batch=192 sizes=(--decoder-embed-dim 7616) ;;
        esac
        [ "$size" != billion ] || sizes+=(--adaptive-input-cutoff 60000,160000 --adaptive-softmax-cutoff 60000,160000
            --no-tie-adaptive-proj)
        model=(--srupp-memory "$memory" --srupp-segment "$memory" --srupp-width "$projection" --dropout "$drop" --output-dropout "$drop"
            --attention-dropout "$attention_drop" --srupp-dropout "$drop" --sru-dropout "$drop" --sru-init xavier --no-srupp-rescale
            --no-sru-input-bias --units-alone --no-decoder-final-norm --no-scale-embedding "${sizes[@]}"
            --lr "$lr" --weight-decay 0.1 --clip-norm 1.0 --warmup-updates 16000 --adam-betas '(0.9, 0.999)')
        every=${name#srupp}
        [ -z "$TOY" ] || every=${every:+2}
        [ -z "$every" ] ||
            model+=(--mixer-pattern "sru*$((every - 1)),srupp" --sru-projection "$projection" --sru-projection-norm
                --sru-projection-dropout "$drop" --no-sru-rescale)
        ;;
    base-* | large-* | billion-* | *-srupp*)
        fail "ROW is $row; base goes with srupp and srupp5, as large and billion do, srupp10 with base and large, and they with no other size"
        ;;
    *-transformer) model=(--mixer softmax) ;;
    *-linear | *-linear_stream) model=("${linear[@]}" --feature-map elu) ;;
    *-delta | *-delta_stream | *-delta_nopos) model=("${delta[@]}" --feature-map elu) ;;
    *-delta_norm | *-delta_nopos_norm) model=("${delta[@]}" --feature-map elu --attention-norm) ;;
    *-performer) model=("${linear[@]}" --feature-map favor --favor-features "$features") ;;
    *-performer_delta) model=("${delta[@]}" --feature-map favor --favor-features "$features") ;;
    *-performer16 | *-performer32) model=("${linear[@]}" --feature-map favor --favor-features "${name#performer}") ;;
    *-performer16_delta | *-performer32_delta)
        features=${name#performer}
        model=("${delta[@]}" --feature-map favor --favor-features "${features%_delta}")
        ;;
    *-dpfp1 | *-dpfp2) model=("${linear[@]}" --feature-map dpfp --dpfp-nu "${name#dpfp}") ;;
    *-dpfp1_delta | *-dpfp2_delta)
        nu=${name#dpfp}
        model=("${delta[@]}" --feature-map dpfp --dpfp-nu "${nu%_delta}")
        ;;
    *-transformer_xl_stream)
        updates=200000
        model=(--mixer transformer_xl --xl-memory "$length" --xl-segment "$length" --warmup-updates 1000)
        ;;
    *-local_attention | *-abc | *-linformer) model=(--mixer "$name") ;;
    *) fail "ROW is $row; it must be $kinds" ;;
esac
task=language_modeling
case $name in *_stream | srupp*) task=stateful_language_modeling ;; esac
case $name in *_stream | *_nopos*) model+=(--no-token-positional-embeddings) ;; esac
if [ -n "$TOY" ]; then
    length=32 batch=8 updates=20
    model+=(--decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --warmup-updates 5)
    model+=(--adaptive-input-cutoff 500,1000 --adaptive-softmax-cutoff 500,1000)
    [ "$arch" = srupp_lm_wiki103_base ] || model+=(--decoder-ffn-embed-dim 64)
    [ "$arch" != srupp_lm_wiki103_base ] || model+=(--srupp-width 8)
fi

default_precision=fp32 trial_of=wikitext103
share "$batch" --batch-size
train "$OUT/runs/${RUN:-$row}" "$OUT/bin" --task $task --arch "$arch" \
    --tokens-per-sample "$length" "${batch[@]}" --required-batch-size-multiple 1 --criterion fast_weight_cross_entropy \
    --ddp-backend legacy_ddp --optimizer adam --lr 0.00025 --lr-scheduler cosine --warmup-updates 2000 --max-update "$updates" \
    --clip-norm 0.25 --no-epoch-checkpoints --log-format json --log-interval 100 "${model[@]}" "$@"
