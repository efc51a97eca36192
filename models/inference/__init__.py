"""Use of a trained model by transformers: its model and tokenizer, generation, evaluation."""
