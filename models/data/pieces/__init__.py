"""Long texts in pieces that give the token ids of one call."""
