"""The HTML page of runs, which opens offline. It needs the extra ``report``."""
