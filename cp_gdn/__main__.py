"""`python -m cp_gdn`."""

import sys

from cp_gdn.cli.main import main

sys.exit(main())
