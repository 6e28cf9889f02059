"""What a person sees: tables, Markdown, CSV, the page of charts."""
