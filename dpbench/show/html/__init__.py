"""The HTML page of runs, which opens offline. To draw it, install the extra ``report``."""
