"""``python -m trainbus``."""

import sys

from trainbus import main

sys.exit(main())
