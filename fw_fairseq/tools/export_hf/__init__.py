"""fw-export-hf: checkpoints as folders for Hugging Face transformers."""
