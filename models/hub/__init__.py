"""Models and data sets of the Hugging Face Hub, fetched into huggingface_hub's own cache."""
