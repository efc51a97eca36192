"""Any Hugging Face decoder as a list of blocks over given memory, and its execution with torch."""
