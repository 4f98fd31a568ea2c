"""Reports: one schema, shown as terminal tables, JSON, plots and an HTML page."""
