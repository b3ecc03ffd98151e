"""fw-explain: the tokens that each layer and head of a language model reads."""
