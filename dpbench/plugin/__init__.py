"""What the pytest plugin is made of; `dpbench.pytest_plugin` is where pytest finds it."""
