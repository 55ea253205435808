"""What was measured, as one HTML file and as Markdown, from raw files only."""
