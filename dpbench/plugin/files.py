"""The files that a session writes beside its run: JSON, tables, rows, a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.errors import check_distinct_files, check_writable_file
from dpbench.options import FILES
from dpbench.show.view import View

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome


class Files:
    """The files that were asked for, by the name of the option that names each.

    Args:
        config: of a session, with the options that name them.
        view: what their tables show.

    Raises:
        ConfigurationError: two options name one file.
    """

    def __init__(self, config: pytest.Config, view: View) -> None:
        self.view = view
        self.directory = config.invocation_params.dir
        self.paths: dict[str, Path] = {
            name: self.directory / path
            for name in FILES
            if (path := getattr(config.option, f"dpbench_{name.replace('-', '_')}")) is not None
        }
        check_distinct_files({f"--dpbench-{name}": path for name, path in self.paths.items()})

    def check(self) -> None:
        """Find out, before anything is measured, whether all of them can be written.

        Raises:
            ConfigurationError: one cannot, or a library for it is missing.
        """
        for path in self.paths.values():
            check_writable_file(path)
        if "html" in self.paths:
            from dpbench.show.html import check_libraries

            check_libraries()

    def names(self) -> list[str]:
        """The files as their user would name them."""
        return [os.path.relpath(path, self.directory) for path in self.paths.values()]

    def write(
        self,
        outcomes: Sequence[Outcome],
        environment: Mapping[str, Any],
        session: Mapping[str, Any],
    ) -> None:
        """Bring all but the page up to date.

        Raises:
            OSError: a file cannot be written.
        """
        from dpbench.results.outcome import write_json
        from dpbench.show.export import write_renderings

        if "json" in self.paths:
            write_json(self.paths["json"], outcomes, environment, session)
        renderings = {
            name.replace("-", "_"): path
            for name, path in self.paths.items()
            if name not in ("json", "html")
        }
        write_renderings(outcomes, self.view, **renderings)

    def write_page(
        self,
        outcomes: Sequence[Outcome],
        environment: Mapping[str, Any],
        session: Mapping[str, Any],
    ) -> None:
        """Draw the page that was asked for, as ``dpbench report`` of the run would.

        It takes a second: once, when the session is over.

        Raises:
            OSError: the file cannot be written.
        """
        from dpbench.results.outcome import document
        from dpbench.show.html.page import write_html
        from dpbench.show.html.source import labelled

        path = self.paths["html"]
        write_html(path, labelled([(path.stem, document(outcomes, environment, session))]))
