"""``python -m trainbus`` is ``trainbus``."""

import sys

from trainbus import main

sys.exit(main())
