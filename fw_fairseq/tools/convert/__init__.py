"""fw-convert: a pretrained softmax Transformer becomes a fast_weight_lm."""
