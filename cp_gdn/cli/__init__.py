"""The command line: `cp-gdn` and `python -m cp_gdn`."""
