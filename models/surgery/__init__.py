"""Takes a Hugging Face model apart into blocks, and lists the tensors of each block."""
