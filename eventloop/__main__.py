"""``python -m eventloop`` is ``trainbus``."""

import sys

from eventloop.cli import main

sys.exit(main())
