"""`python -m cp_gdn.run`: see integrations/run.py."""

import sys

from cp_gdn.integrations.run import enable_all, main

__all__ = ["enable_all", "main"]

if __name__ == "__main__":
    sys.exit(main())
