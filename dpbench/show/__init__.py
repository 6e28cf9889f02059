"""Output for people: tables, Markdown, CSV, and the page of charts."""
