"""Any Hugging Face decoder as a list of blocks over given memory, and what runs them with torch."""
