"""Takes a Hugging Face model apart into blocks, and says what each block holds."""
