"""For all tests: nothing may depend on how fast the machine is, property tests included."""

from hypothesis import settings

settings.register_profile("any-speed", deadline=None)
settings.load_profile("any-speed")
