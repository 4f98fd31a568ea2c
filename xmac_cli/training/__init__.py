"""One training loop for every verb that trains: schedule, mixed precision, accumulation, resume, EMA, metrics."""
