"""Training text: corpora, tokenizers, token files, and the micro-batches of stages."""
