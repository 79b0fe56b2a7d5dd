"""No test measures time: an example may take as long as a busy machine needs."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
