"""``python -m functricks`` is the ``functricks`` command."""

from functricks.cli import main

raise SystemExit(main())
