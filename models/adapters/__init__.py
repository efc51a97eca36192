"""Low-rank adapters of a model (LoRA): their modules, places and numbers."""
