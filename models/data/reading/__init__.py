"""Files of text as records: strict decoding, formats, documents."""
