"""Output for people: tables, Markdown, CSV, the page of charts."""
