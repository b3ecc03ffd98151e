"""Decoders of transformers whose attention is fast weights, layer by layer, without fairseq."""
