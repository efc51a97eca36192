"""What the parts of a language model do on a GPU, kernel by kernel."""
