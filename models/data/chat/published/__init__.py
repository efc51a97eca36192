"""Published chat templates: their training variants, and defaults of their variables."""
