"""Parts of the pytest plugin, which pytest loads from `dpbench.pytest_plugin`."""
