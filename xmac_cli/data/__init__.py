"""Reading text and tokens: files of documents, calibration batches, and the corpus that every Python carries."""
